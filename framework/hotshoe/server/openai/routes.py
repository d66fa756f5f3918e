"""Which path leads to which handler, and what ``/openapi.json`` says about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from hotshoe import __version__
from hotshoe.server.openai.chat import chat
from hotshoe.server.openai.completions import complete
from hotshoe.server.openai.models import Models
from hotshoe.server.openai.responses import respond
from hotshoe.server.openai.schemas import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from hotshoe.server.openai.service import Service
from hotshoe.server.openai.tokenize import detokenize, tokenize

Handler = Callable[[Service, Request], Awaitable[Response]]

_BODIES: dict[str, tuple[Handler, type[ApiRequest], str]] = {
    "/v1/completions": (complete, CompletionRequest, "Continue texts"),
    "/v1/chat/completions": (chat, ChatRequest, "Answer a conversation"),
    "/v1/responses": (respond, ResponsesRequest, "Answer a conversation, Responses API"),
    "/tokenize": (tokenize, TokenizeRequest, "Text or conversation to token ids"),
    "/detokenize": (detokenize, DetokenizeRequest, "Token ids to text"),
}
_REF = "#/components/schemas/{model}"


def api_router(service: Service) -> APIRouter:
    """OpenAI's endpoints."""
    router = APIRouter()
    for path, (handler, kind, summary) in _BODIES.items():
        schema = {"$ref": _REF.format(model=kind.__name__)}
        router.add_api_route(
            path,
            _bound(service, handler),
            methods=["POST"],
            summary=summary,
            operation_id=handler.__name__,
            response_class=Response,
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                }
            },
        )
    models = Models(service)
    router.add_api_route("/v1/models", models.all, summary="The served models")
    router.add_api_route("/v1/models/{model_id:path}", models.one, summary="One served model")
    return router


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document; the bodies' schemas are ours, since handlers parse by themselves."""
    document = get_openapi(title="hotshoe", version=__version__, routes=app.routes)
    kinds = [(kind, "validation") for _, kind, _ in _BODIES.values()]
    _, schemas = models_json_schema(kinds, ref_template=_REF)  # type: ignore[arg-type]  # literal
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    return document


def _bound(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await handler(service, request)

    return handle
