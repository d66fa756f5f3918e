"""The command line as a config layer, and the help text about its flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_settings import BaseSettings

from hotshoe.config.paths import Path, Paths, Target, did_you_mean
from hotshoe.config.sources import LayerSource, Setting
from hotshoe.config.values import split_optional

_TRUTH = {"true", "false", "yes", "no", "on", "off", "1", "0"}


class CommandLineSource(LayerSource):
    """Flags: ``--scheduler.max-num-seqs 8``, ``--max-num-seqs=8``, ``--scheduler priority``,
    ``--scheduler.options.aging 5``, ``--no-enable-prefix-caching``.

    A flag given twice: the last one counts; lists grow, options merge.

    Args:
        cli: the arguments, or values by flag without dashes.
        keep_unknown: leave what is no config flag in ``rest`` instead of reporting it.

    Attributes:
        rest: arguments that are no config flags, in order.
        taken: config flags and their values, in order.
    """

    def __init__(
        self,
        settings_cls: type[BaseSettings],
        paths: Paths,
        cli: Sequence[str] | Mapping[str, Any],
        *,
        keep_unknown: bool = False,
    ) -> None:
        super().__init__(settings_cls, paths)
        self.rest: list[str] = []
        self.taken: list[str] = []
        if isinstance(cli, Mapping):
            self._take_mapping(cli)
        else:
            self._scan(list(cli))
        if not keep_unknown:
            self.problems.extend(unknown_flag(token, paths) for token in self.rest)

    def settles(self, path: Path, value: Any, origin: str) -> bool:
        """A later flag wins."""
        return True

    def _take_mapping(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            flag = f"--{name}"
            target, negated = self._find(flag)
            if target is None:
                self.rest.append(flag)
            elif isinstance(value, str):
                self._store(target, value, flag, negated)
            else:
                self.put(target.section or target.path, value, f"cli {flag}")

    def _scan(self, tokens: list[str]) -> None:
        position = 0
        while position < len(tokens):
            token = tokens[position]
            target, negated = self._find(token.partition("=")[0])
            if token == "--":
                self.rest.extend(tokens[position:])
                return
            if target is None:
                self.rest.append(token)
                position += 1
                continue
            following = tokens[position + 1] if position + 1 < len(tokens) else None
            value, num_tokens = _value_of(token, following, is_switch=_is_switch(target))
            self.taken.extend(tokens[position : position + num_tokens])
            position += num_tokens
            flag = token.partition("=")[0]
            if value is None:
                self.problems.append(f"{flag}: expected a value for {'.'.join(target.path)}")
            else:
                self._store(target, value, flag, negated)

    def _find(self, flag: str) -> tuple[Target | None, bool]:
        """The target of a flag, and whether the flag negates it."""
        if not flag.startswith("--"):
            return None, False
        name = flag.removeprefix("--").replace("-", "_")
        target = self.paths.find(name)
        if target is not None:
            return target, False
        head, _, last = name.rpartition(".")
        for positive in (name.removeprefix("no_"), f"{head}.{last.removeprefix('no_')}"):
            target = self.paths.find(positive) if positive != name else None
            if target is not None and _is_switch(target):
                return target, True
        return None, False

    def _store(self, target: Target, text: str, flag: str, negated: bool) -> None:
        if negated and text.lower() in _TRUTH:
            text = "false" if text.lower() in ("true", "yes", "on", "1") else "true"
        before = self.settings.get(target.path)
        self.put_text(target, text, f"cli {flag}")
        if before is not None and isinstance(before.value, list):
            added = self.settings[target.path].value
            if isinstance(added, list):
                self.settings[target.path] = Setting(before.value + added, f"cli {flag}")


def _value_of(token: str, following: str | None, *, is_switch: bool) -> tuple[str | None, int]:
    """The value of a flag (None if it lacks one), and how many tokens it takes with its value."""
    _, equals, value = token.partition("=")
    if equals:
        return value, 1
    if is_switch:
        given = following is not None and following.lower() in ("true", "false")
        return (following, 2) if given else ("true", 1)
    if following is None or following.startswith("--"):
        return None, 1
    return following, 2


def _is_switch(target: Target) -> bool:
    return target.field is not None and split_optional(target.field.annotation)[0] is bool


def unknown_flag(token: str, paths: Paths, others: Sequence[str] = ()) -> str:
    """The complaint about an argument that nobody takes."""
    if not token.startswith("-"):
        return f"unexpected argument {token!r}"
    flag = token.partition("=")[0]
    known = [flag_of(name) for name in paths.names()]
    negated = [f"--no-{name.removeprefix('--')}" for name in known] if "no-" in flag else []
    hint = did_you_mean(flag.replace("_", "-"), [*known, *negated, *others])
    return f"unknown flag {flag}{hint}"


def flag_of(name: str) -> str:
    """The flag that sets a path or alias."""
    return "--" + name.replace("_", "-")
