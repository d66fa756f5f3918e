"""Validate ``<section>.options`` with the model that the selected plugin declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hotshoe.api.component import PluginOptions
from hotshoe.config.paths import did_you_mean
from hotshoe.config.values import config_error, describe_allowed

Options = TypeVar("Options", bound=PluginOptions)


def validate_plugin_options(model: type[Options], raw: Mapping[str, Any], path: str) -> Options:
    """Turn raw values into a plugin's options. Text is coerced, as it comes from a command line.

    Args:
        model: what the plugin declares as ``Component.options``.
        raw: values by option name.
        path: dotted path of the mapping in the config, such as ``scheduler.options``.

    Raises:
        ConfigError: names every wrong option by its full path, its value and what is allowed.
    """
    try:
        return model.model_validate(dict(raw))
    except ValidationError as error:
        problems = [_explain(model, path, item) for item in error.errors(include_url=False)]
    raise config_error(problems)


def _explain(model: type[BaseModel], path: str, item: Any) -> str:
    """One line about one mistake."""
    where = ".".join([path, *map(str, item["loc"])])
    fields = _fields(model, item["loc"][:-1])
    if item["type"] in ("extra_forbidden", "missing"):
        key = str(item["loc"][-1])
        known = ", ".join(fields) or "none"
        if item["type"] == "missing":
            return f"{where}: required but not set; options of this plugin: {known}"
        hint = did_you_mean(key, list(fields))
        return f"{where}: unknown option; options of this plugin: {known}{hint}"
    field = fields.get(str(item["loc"][-1])) if item["loc"] else None
    # the words of a plugin's own validator say more than the type does
    if field is None or item["type"] in ("value_error", "assertion_error"):
        message = str(item["msg"])
        return f"{where}: got {item['input']!r}, {message[:1].lower()}{message[1:]}"
    return f"{where}: got {item['input']!r}, allowed: {describe_allowed(field)}"


def _fields(model: type[BaseModel], loc: tuple[int | str, ...]) -> dict[str, FieldInfo]:
    """Fields at a place inside the model; empty where it can't be told, as inside a list."""
    inner: Any = model
    for part in loc:
        field = inner.model_fields.get(part) if _is_model(inner) else None
        inner = field.annotation if field is not None else None
    if not _is_model(inner):
        return {}
    return {field.alias or name: field for name, field in inner.model_fields.items()}


def _is_model(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)
