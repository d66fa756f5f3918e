"""The layers that a config is built from, each read whole, and how they are merged."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from hotshoe.config.paths import ALIASES, Path, Paths, Target, did_you_mean
from hotshoe.config.values import config_error, decode_option, decode_text, dotted, none_from_text


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and where it came from."""

    value: Any
    origin: str


class LayerSource(PydanticBaseSettingsSource):
    """One layer, read when it is built.

    Attributes:
        settings: value by path; of a plugin's options each key has its own path.
        problems: what is wrong with it, one line each.
    """

    def __init__(self, settings_cls: type[BaseSettings], paths: Paths) -> None:
        super().__init__(settings_cls)
        self.paths = paths
        self.settings: dict[Path, Setting] = {}
        self.problems: list[str] = []

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The layer's value of one top-level field, as pydantic-settings asks for it."""
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return nest(self.settings)

    def put(self, path: Path, value: Any, origin: str) -> None:
        """Store a value, leaf by leaf where it is a section or the options of a plugin."""
        for leaf, raw in self._leaves(path, value, origin):
            leaf_value = none_from_text(self.paths.leaves.get(".".join(leaf)), raw)
            if leaf in self.settings and not self.settles(leaf, leaf_value, origin):
                earlier = self.settings[leaf].origin
                both = origin if origin == earlier else f"{earlier} and {origin}"
                self.problems.append(f"{dotted(leaf)}: given twice, by {both}; give it once")
            else:
                self.settings[leaf] = Setting(leaf_value, origin)

    def settles(self, path: Path, value: Any, origin: str) -> bool:
        """Whether a second value for a path may replace the first; no, unless a layer says so."""
        return False

    def put_text(self, target: Target, text: str, origin: str) -> None:
        """Store a value that came as text, read as the type of its field."""
        if target.section is not None and text.lstrip().startswith("{"):
            self.put(target.section, _parse_json(text), origin)
        elif target.field is None:
            self.put(target.path, decode_option(text), origin)
        else:
            self.put(target.path, decode_text(target.field, text), origin)

    def _leaves(self, path: Path, value: Any, origin: str) -> Iterator[tuple[Path, Any]]:
        name = ".".join(path)
        is_options = name in self.paths.leaves and path[-1] == "options"
        if not is_options and name not in self.paths.sections:
            yield path, value
            return
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        if isinstance(value, Mapping):
            for key, item in value.items():
                if isinstance(key, str):
                    yield from self._leaves((*path, key), item, origin)
                else:
                    self.problems.append(f"{name}: key {key!r} is not text ({origin}); quote it")
        elif not is_options and self._fits_shorthand(name, value):
            yield tuple(str(self.paths.shorthand(name)).split(".")), value
        else:
            self.problems.append(f"{name}: got {value!r} ({origin}), allowed: {self._shape(name)}")

    def _fits_shorthand(self, section: str, value: Any) -> bool:
        short = self.paths.shorthand(section)
        if short is None:
            return False
        return isinstance(value, str) or (
            value is None and self.paths.leaves[short].get_default() is None
        )

    def _shape(self, name: str) -> str:
        short = self.paths.shorthand(name) if name in self.paths.sections else None
        return f"a mapping, or text for {short}" if short else "a mapping"


class FileSource(LayerSource):
    """A YAML, TOML or JSON file.

    Raises:
        ConfigError: if it can't be read or parsed; nothing else is worth reporting then.
    """

    def __init__(self, settings_cls: type[BaseSettings], paths: Paths, file: FilePath) -> None:
        super().__init__(settings_cls, paths)
        for key, value in read_file(file).items():
            if isinstance(key, str):
                self.put((key,), value, f"file {file}")
            else:
                self.problems.append(f"key {key!r} is not text (file {file}); quote it")


class EnvironmentSource(LayerSource):
    """Variables such as ``HOTSHOE_CACHE__BLOCK_SIZE``; one that fits no field is a problem."""

    def __init__(
        self,
        settings_cls: type[BaseSettings],
        paths: Paths,
        environment: Mapping[str, str],
        *,
        prefix: str,
    ) -> None:
        super().__init__(settings_cls, paths)
        for variable in sorted(name for name in environment if name.startswith(prefix)):
            name = variable.removeprefix(prefix).lower().replace("__", ".")
            target = paths.find(name, aliases=False)
            if target is None:
                self.problems.append(self._unknown(variable, name, prefix))
            else:
                self.put_text(target, environment[variable], f"env {variable}")

    def _unknown(self, variable: str, name: str, prefix: str) -> str:
        def as_variable(path: str) -> str:
            return prefix + path.upper().replace(".", "__")

        known = [as_variable(path) for path in self.paths.names(aliases=False)]
        hint = did_you_mean(variable, known)
        if name in ALIASES:
            hint = f" (did you mean {as_variable(ALIASES[name])!r}?)"
        return (
            f"environment variable {variable} matches no config field{hint}; rename or unset it, "
            "hotshoe config show --help lists the fields"
        )


class ArgumentSource(LayerSource):
    """Python arguments: sections, component names, and well-known names."""

    def __init__(
        self, settings_cls: type[BaseSettings], paths: Paths, arguments: Mapping[str, Any]
    ) -> None:
        super().__init__(settings_cls, paths)
        for name, value in arguments.items():
            if name in settings_cls.model_fields:
                self.put((name,), value, "argument")
            elif name in ALIASES:
                self.put(tuple(ALIASES[name].split(".")), value, "argument")
            else:
                hint = did_you_mean(name, [*settings_cls.model_fields, *ALIASES])
                self.problems.append(f"unknown argument {name!r}{hint}")


def merge(layers: Sequence[LayerSource], paths: Paths) -> tuple[dict[Path, Setting], list[str]]:
    """Put the layers on top of each other, lowest first.

    Where a layer selects another plugin, the options that lower layers gave to the former one go.

    Returns:
        The settings that count, and a line for each option that went.
    """
    merged: dict[Path, Setting] = {}
    notes: list[str] = []
    for layer in layers:
        for section in paths.components():
            notes.extend(_drop_stale_options(merged, layer, section, paths))
        merged.update(layer.settings)
    return merged, notes


def _drop_stale_options(
    merged: dict[Path, Setting], layer: LayerSource, section: Path, paths: Paths
) -> Iterator[str]:
    chosen = layer.settings.get((*section, "name"))
    if chosen is None:
        return
    before = merged.get((*section, "name"))
    name = before.value if before else paths.leaves[".".join((*section, "name"))].get_default()
    if chosen.value == name:
        return
    for path in [path for path in merged if path[:-1] == (*section, "options")]:
        dropped = merged.pop(path)
        yield (
            f"{dotted(path)} ({dropped.origin}) is for {name!r} and dropped, as {chosen.origin} "
            f"selects {chosen.value!r}"
        )


def nest(settings: Mapping[Path, Setting]) -> dict[str, Any]:
    """The nested mapping that these paths describe."""
    root: dict[str, Any] = {}
    for path, setting in settings.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = setting.value
    return root


def read_file(file: FilePath) -> dict[Any, Any]:
    """Parse a config file by its extension; an empty one is an empty mapping."""
    parse = _PARSERS.get(file.suffix.lower())
    if parse is None:
        raise config_error([f"config file {str(file)!r} must end in .yaml, .yml, .toml or .json"])
    try:
        content = parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise config_error([f"can't read config file {str(file)!r}: {error.strerror}"]) from None
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise config_error([f"can't parse config file {str(file)!r}: {reason}"]) from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise config_error([f"config file {str(file)!r} holds a {kind}, expected a mapping"])
    return content


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; this refuses them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", node.value[index][0].start_mark
                )
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str) -> Any:
    content = yaml.load(text, _UniqueKeyLoader)
    return {} if content is None else content


def _parse_json_file(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique_pairs) if text.strip() else {}


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return found


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": tomllib.loads,
    ".json": _parse_json_file,
}
