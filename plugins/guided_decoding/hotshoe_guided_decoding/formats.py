"""Formats of texts as patterns that accept only what the format's standard does, if not all."""

from __future__ import annotations

_YEAR = r"[1-9][0-9]{3}"
_LEAP_YEAR = r"([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_ZONE = r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"

PATTERN_OF = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}{_ZONE}$",
    "date-time": f"^{_DATE}T{_TIME}{_ZONE}$",
    "ipv4": rf"^{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,2}}$",
}
"""Calendar days of the years 1000 to 9999, no leap seconds; host names of up to three labels."""
