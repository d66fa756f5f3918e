"""The flags of ``SamplingParams``, made from its fields and docstring."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Collection
from types import NoneType
from typing import Any, get_args, get_origin

import msgspec

from hotshoe.api.sampling_params import SamplingParams
from hotshoe.config import EngineConfig
from hotshoe.config.help import format_value
from hotshoe.config.paths import Paths
from hotshoe.config.values import config_error
from hotshoe.entrypoints.cli.engine_arguments import CommandParser

PREFIX = "sampling-"
"""What a flag starts with if the config has a flag of that name already, as it has ``--seed``."""


def add_sampling_arguments(
    parser: CommandParser, *, without: Collection[str] = (), **defaults: str
) -> None:
    """Add one flag per field of ``SamplingParams``.

    Lists of texts are given by repeating the flag, lists of numbers with commas, anything else that
    is not a plain value as JSON; members of a record by flags with a dot, too.

    Args:
        parser: of the command.
        without: fields that make no sense for the command.
        defaults: what the help says of a field's default, where the command has its own.
    """
    group = parser.add_argument_group(
        "sampling",
        "Defaults are those of the model's generation_config.json if it has them.",
    )
    documented = _attribute_docs(SamplingParams)
    for field in msgspec.structs.fields(SamplingParams):
        if field.name in without:
            continue
        default = defaults.get(field.name) or _described_default(field.default)
        text = f"{documented.get(field.name, '')} (default: {default})"
        group.add_argument(
            sampling_flag(field.name),
            dest=_DEST + field.name,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_parsing(field.type),
        )
        record = _inner(field.type)
        if isinstance(record, type) and issubclass(record, msgspec.Struct):
            _add_members(group, field.name, record)


def _add_members(group: argparse._ArgumentGroup, name: str, record: type[msgspec.Struct]) -> None:
    documented = _attribute_docs(record)
    for member in msgspec.structs.fields(record):
        path = f"{name}.{member.name}"
        group.add_argument(
            sampling_flag(path),
            dest=_DEST + path,
            default=argparse.SUPPRESS,
            help=documented[member.name].replace("%", "%%"),
            **_parsing_of_member(member.type),
        )


def sampling_flag(name: str) -> str:
    """The flag of a field: ``--top-p``, but ``--sampling-seed``, as ``--seed`` is the engine's."""
    spelt = name.replace("_", "-")
    is_taken = Paths.of(EngineConfig).find(name) is not None
    return f"--{PREFIX}{spelt}" if is_taken else f"--{spelt}"


def given_sampling(namespace: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given, checked.

    Raises:
        SamplingParamsError: if they can't stand together, or one is out of range.
    """
    given: dict[str, Any] = {}
    members: dict[str, dict[str, Any]] = {}
    for key, value in vars(namespace).items():
        if key.startswith(_DEST):
            name, _, member = key.removeprefix(_DEST).partition(".")
            if member:
                members.setdefault(name, {})[member] = value
            else:
                given[name] = value
    records = {field.name: _inner(field.type) for field in msgspec.structs.fields(SamplingParams)}
    for name, values in members.items():
        if name in given:
            first = sampling_flag(f"{name}.{next(iter(values))}")
            raise config_error([f"{sampling_flag(name)} and {first} say the same; drop one"])
        given[name] = records[name](**values)
    SamplingParams(**given)
    return given


_DEST = "sampling_params."


def _inner(kind: Any) -> Any:
    """A type without its None."""
    members = [one for one in get_args(kind) or (kind,) if one is not NoneType]
    is_union = get_origin(kind) is not tuple and len(members) < len(get_args(kind))
    return members[0] if is_union else kind


def _parsing_of_member(kind: Any) -> dict[str, Any]:
    """How ``argparse`` reads a member of a record, where anything may be given as text."""
    inner = _inner(kind)
    if inner is bool:
        return {"action": "store_true"}
    return {"metavar": "TEXT"} if inner in (str, Any) else _parsing(kind)


def _parsing(kind: Any) -> dict[str, Any]:
    """How ``argparse`` reads a value of this type."""
    inner = _inner(kind)
    if inner is bool:
        return {"action": argparse.BooleanOptionalAction}
    if inner == tuple[str, ...]:
        return {"action": "extend", "type": lambda text: [text], "metavar": "TEXT"}
    if inner == tuple[int, ...]:
        return {"type": _reader(_numbers), "metavar": "N,N,..."}
    if inner in (int, float):
        return {"type": _reader(_number(kind, inner)), "metavar": "N" if inner is int else "X"}
    return {"type": _reader(lambda text: msgspec.json.decode(text, type=inner)), "metavar": "JSON"}


def _number(kind: Any, inner: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if kind is not inner and text.lower() == "none":
            return None
        return msgspec.convert(text, inner, strict=False)

    return read


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """``read`` with its errors in ``argparse``'s form, which names the flag."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except (msgspec.MsgspecError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"got {text!r}: {error}") from None

    return checked


def _described_default(value: Any) -> str:
    return "none" if value is None or value == () else format_value(value)


def _attribute_docs(documented: type) -> dict[str, str]:
    """The ``Attributes`` section of a docstring, by name, each on one line."""
    _, _, section = (inspect.getdoc(documented) or "").partition("Attributes:\n")
    entries = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)
    texts = (" ".join(text.split()).replace("``", "") for text in entries[2::2])
    return dict(zip(entries[1::2], texts, strict=True))
