"""Server-sent events, read as the standard says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

END = "[DONE]"


def data_of(response: httpx.Response) -> Iterator[str]:
    """The data of each event of a streamed response."""
    lines: list[str] = []
    for line in response.iter_lines():
        if line:
            lines.append(line)
        elif lines:
            yield "\n".join(one.removeprefix("data: ") for one in lines if one[:5] == "data:")
            lines = []
    assert not lines, "the last event has no end"


def stream(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """All records of a streamed response, whose last event says that it is done."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        found = list(data_of(response))
    assert found[-1] == END
    assert END not in found[:-1]
    return [json.loads(one) for one in found[:-1]]


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Joined text by choice, of completions or chat."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts
