"""JSON schema of a config file, with the options of the installed plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotshoe.api.contracts import KINDS
from hotshoe.config.paths import Paths
from hotshoe.config.schema import EngineConfig


def config_json_schema(plugin_options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The schema (draft 2020-12) that an editor can check a config file with.

    Args:
        plugin_options: schema of a plugin's options by ``kind/name``; a section that selects the
            plugin accepts only these.
    """
    schema = EngineConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    paths = Paths.of(EngineConfig)
    for section in paths.sections:
        _accept_shorthand(schema, paths, section)
    for key, options in plugin_options.items():
        kind, name = key.split("/", 1)
        _add_options(schema, paths, KINDS[kind].section, name, {**options, "$id": f"urn:{key}"})
    return schema


def _accept_shorthand(schema: dict[str, Any], paths: Paths, section: str) -> None:
    """Let plain text stand for the section, as ``scheduler: priority``."""
    short = paths.shorthand(section)
    if short is None:
        return
    parent, _, key = section.rpartition(".")
    owner = _definition(schema, paths, parent) if parent else schema
    described = owner["properties"][key]
    text = {"type": "string", "minLength": 1, "description": f"short for {short}"}
    owner["properties"][key] = {
        "anyOf": [{"$ref": _reference(paths, section)}, text],
        "description": described.get("description", ""),
    }


def _add_options(
    schema: dict[str, Any], paths: Paths, section: str, name: str, options: dict[str, Any]
) -> None:
    definition = _definition(schema, paths, section)
    condition: dict[str, Any] = {"properties": {"name": {"const": name}}}
    if definition["properties"]["name"].get("default") != name:
        # without this a section that leaves its name out would match every plugin
        condition["required"] = ["name"]
    rule = {"if": condition, "then": {"properties": {"options": options}}}
    definition.setdefault("allOf", []).append(rule)


def _definition(schema: dict[str, Any], paths: Paths, section: str) -> dict[str, Any]:
    found: dict[str, Any] = schema["$defs"][_reference(paths, section).rpartition("/")[2]]
    return found


def _reference(paths: Paths, section: str) -> str:
    model = paths.sections.get(section)
    name = model.__name__ if model is not None else "LogitsProcessorConfig"
    return f"#/$defs/{name}"
