"""Program behind ``inspect_in_subprocess``: import one plugin and write what it says as JSON.

``python -m hotshoe.plugins.probe KIND NAME DISTRIBUTION VERSION MODULE RESULT_FILE``
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hotshoe.config.values import describe_allowed
from hotshoe.errors import PluginError
from hotshoe.plugins.checks import ask_component, import_plugin
from hotshoe.plugins.discovery import PluginInfo, find_kind


def describe(info: PluginInfo) -> dict[str, Any]:
    """Import a plugin here and tell what it offers; an error is part of the answer."""
    try:
        module = import_plugin(info)
        component = ask_component(info, module)
    except PluginError as error:
        return {"status": "error", "error": str(error)}
    return {
        "status": "ok",
        "contract": component.contract,
        "is_experimental": find_kind(info.kind).is_experimental,
        "doc": inspect.getdoc(module) or "",
        "options": [
            _describe_option(name, field) for name, field in component.options.model_fields.items()
        ],
        "capabilities": _plain(component.capabilities),
        "unsupported": list(component.unsupported),
        "auto_priority": component.auto_priority,
        "prepares": component.prepare is not None,
        "options_schema": _schema(component.options),
    }


def _describe_option(name: str, field: FieldInfo) -> dict[str, Any]:
    described = {
        "name": field.alias or name,
        "type": inspect.formatannotation(field.annotation),
        "required": field.is_required(),
        "description": field.description or "",
        "allowed": describe_allowed(field),
    }
    if not field.is_required():
        described["default"] = _plain(field.get_default(call_default_factory=True))
    return described


def _schema(options: type[BaseModel]) -> dict[str, Any] | str:
    """JSON schema of the options, or why there is none (a type that JSON can't express)."""
    try:
        return options.model_json_schema()
    except Exception as error:
        return f"no JSON schema: {error}"


def _plain(value: Any) -> Any:
    """Dataclasses and models as mappings, containers as lists, what JSON can't hold as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, BaseModel):
        return {name: _plain(one) for name, one in value}
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(one) for one in value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def main() -> None:
    """Describe one plugin; what it prints goes elsewhere, only the file is the answer."""
    info = PluginInfo(*sys.argv[1:6])
    result_file = Path(sys.argv[6])
    unfinished = result_file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(describe(info)))
    unfinished.rename(result_file)
    # threads that the plugin started must not keep this process alive
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
