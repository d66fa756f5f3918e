"""The built-in page at ``/``: static files with a chat playground and a live view of the engine."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response

from hotshoe.entrypoints.async_llm import AsyncLLM

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # browsers ask again each time, so that an upgraded server never meets an old script
    "Cache-Control": "no-cache",
}
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_MEDIA_TYPES |= {".svg": "image/svg+xml"}


def add_page(app: FastAPI, llm: AsyncLLM) -> None:
    """Serve the page at ``/``, its files under ``/assets/``, and what it polls at ``/live``.

    The page and its files are the same for everybody and need no API key; ``/live`` and the API
    do, if the server demands one.
    """
    app.add_api_route(
        "/", _Files("").respond, methods=["GET", "HEAD"], include_in_schema=False, name="page"
    )
    app.add_api_route(
        "/assets/{name}",
        _Files("assets").respond,
        methods=["GET", "HEAD"],
        include_in_schema=False,
        name="assets",
    )

    @app.get("/live", summary="The engine's recent past, as the page shows it")
    async def live(after: Annotated[int, Query(ge=-1, le=2**53)] = -1) -> dict[str, Any]:
        return await _live(llm, after)


async def _live(llm: AsyncLLM, after_step: int) -> dict[str, Any]:
    """What the engine has to tell since a step, and the facts about it that don't change."""
    facts = llm.facts
    recent: dict[str, Any] = await llm.call("live", after_step)
    return recent | {
        "facts": {
            "device": facts.device,
            "dtype": facts.dtype,
            "max_model_len": facts.max_model_len,
        }
    }


class _Files:
    """The files of one folder of this package, read once; nothing else can be asked for."""

    def __init__(self, folder: str) -> None:
        self._files = {
            file.name: (file.read_bytes(), media_type)
            for file in files(__package__).joinpath(folder).iterdir()
            for suffix, media_type in _MEDIA_TYPES.items()
            if file.name.endswith(suffix)
        }
        self._tags = {
            name: f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            for name, (body, _) in self._files.items()
        }

    async def respond(self, request: Request, name: str = "index.html") -> Response:
        """One file, or 304 if the browser has it already."""
        if name not in self._files:
            return Response(status_code=404, headers=_HEADERS)
        headers = _HEADERS | {"ETag": self._tags[name]}
        if request.headers.get("if-none-match") == self._tags[name]:
            return Response(status_code=304, headers=headers)
        body, media_type = self._files[name]
        return Response(body, media_type=media_type, headers=headers)
