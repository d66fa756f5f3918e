"""The HTTP application around an engine."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from hotshoe import __version__
from hotshoe.entrypoints.async_llm import AsyncLLM
from hotshoe.errors import RequestError
from hotshoe.server.gate import Gate
from hotshoe.server.http_metrics import HttpMetrics
from hotshoe.server.openai.errors import ApiError, invalid
from hotshoe.server.openai.routes import api_router, describe
from hotshoe.server.openai.service import Service
from hotshoe.server.status import status_router

logger = logging.getLogger(__name__)


def create_app(llm: AsyncLLM) -> FastAPI:
    """The application of one API server process.

    Raises:
        ConfigError: if the API keys can't be read, or traces can't be sent.
    """
    config = llm.config.server
    # no page of FastAPI's own: it would load scripts from elsewhere
    app = FastAPI(
        title="hotshoe", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    service = Service(llm)
    app.state.service = service
    app.include_router(api_router(service))
    app.include_router(status_router(llm))
    if config.page:
        from hotshoe.server.page import add_page

        add_page(app, llm)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_bad_query)
    app.add_middleware(Gate, config=config)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "warning", "retry-after"],
        )
    app.add_middleware(HttpMetrics, llm=llm)
    _describe_once(app)
    _warm_up(llm)
    return app


async def close_app(app: FastAPI) -> None:
    """Send what is left to be sent."""
    tracing = app.state.service.tracing
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Routing errors in the shape of all others."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        shown = ApiError(404, f"there is nothing at {path!r:.200}", code="unknown_url")
    elif error.status_code == 405:
        message = f"{path!r:.200} doesn't take {request.method!r:.20}"
        shown = ApiError(405, message, code="method_not_allowed", headers=error.headers)
    else:
        shown = ApiError(error.status_code, str(error.detail), headers=error.headers)
    return shown.response()


async def _answer_bad_query(request: Request, error: Exception) -> Response:
    """What FastAPI checks by itself, such as the query, in the shape of all other errors."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = str(first["loc"][-1])
    return invalid(f"{where}: {first['msg'].lower()}", param=where, code="invalid_value").response()


def _describe_once(app: FastAPI) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _warm_up(llm: AsyncLLM) -> None:
    """Import and compile what the first conversation would have to wait for."""
    try:
        llm.render_chat([{"role": "user", "content": "hello"}])
    except RequestError as error:
        logger.info("conversations can't be served: %s", error)
