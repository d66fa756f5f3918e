"""What a model that was trained on a format is told of the tools, where its template can't."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hotshoe.api import Tool


def signature(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI's API describes it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    if tool.description is None:
        del function["description"]
    return {"type": "function", "function": function}


def listed(tools: Sequence[Tool]) -> str:
    """One tool a line, as JSON."""
    return "\n".join(json.dumps(signature(tool), ensure_ascii=False) for tool in tools)
