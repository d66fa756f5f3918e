"""Validate ``<section>.options`` with the model that the selected plugin declares."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hotshoe.api.component import PluginOptions
from hotshoe.errors import ConfigError

Options = TypeVar("Options", bound=PluginOptions)


def validate_plugin_options(model: type[Options], raw: Mapping[str, Any], path: str) -> Options:
    """Turn raw values into a plugin's options. Strings are coerced, as they come from a command
    line.

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
        # no url and no input dump: one line per mistake, in the words of the config file
        lines = [_explain(model, path, item) for item in error.errors(include_url=False)]
        raise ConfigError("; ".join(lines)) from error


def _explain(model: type[BaseModel], path: str, item: Any) -> str:
    where = ".".join([path, *map(str, item["loc"])])
    known = _known_options(model, item["loc"][:-1])
    if item["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        listed = ", ".join(known) or "this plugin has none"
        return f"{where} is not an option, got {item['input']!r}; options: {listed}{hint}"
    if item["type"] == "missing":
        return f"{where} is required and not set; options: {', '.join(known)}"
    reason = item["msg"][:1].lower() + item["msg"][1:]
    return f"{where}: got {item['input']!r}, {reason}"


def _known_options(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Option names at a place inside the model; empty where it can't be told, as in a union."""
    inner: Any = model
    for part in loc:
        field = inner.model_fields.get(part) if _is_model(inner) else None
        inner = field.annotation if field is not None else None
    return (
        [field.alias or name for name, field in inner.model_fields.items()]
        if _is_model(inner)
        else []
    )


def _is_model(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)
