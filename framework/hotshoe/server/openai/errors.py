"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from hotshoe.errors import (
    DrainingError,
    EngineDeadError,
    QueueFullError,
    RequestError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = "1"
_TYPES = {
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_short = reprlib.Repr()
_MEMBERS = ("str", "int", "float", "bool")
_PARAMS = {"bad_words_token_ids": "bad_words"}


class ApiError(Exception):
    """What a client is told when its request fails.

    Attributes:
        status: of HTTP.
        param: the request field at fault, if it is one.
        code: a word for programs, such as ``model_not_found``.
        headers: more headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's name for this kind of error."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return _TYPES.get(self.status, default)

    @property
    def body(self) -> dict[str, Any]:
        """As the client gets it."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """As a response."""
        return Response(
            msgspec.json.encode(self.body),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A bad request."""
    return ApiError(400, message, param=param, code=code)


def later(status: int, message: str, code: str) -> ApiError:
    """Not now: the same request may be served later."""
    return ApiError(status, message, code=code, headers={"Retry-After": _RETRY_AFTER_S})


def from_exception(error: BaseException, request_id: str) -> ApiError:
    """What to tell a client about any error. What is nobody's fault but ours is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        param = None if error.field is None else _PARAMS.get(error.field, error.field)
        return invalid(str(error), param=param, code="invalid_value")
    if isinstance(error, QueueFullError):
        return later(429, str(error), "queue_full")
    if isinstance(error, DrainingError):
        return later(503, str(error), "draining")
    if isinstance(error, UnavailableError):
        return later(503, str(error), "unavailable")
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine has stopped: {error}", code="engine_dead")
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(
        500,
        f"the server failed on request {request_id!r}; its log says why",
        code="internal_error",
    )


def client_gone() -> ApiError:
    """The client has left; nobody receives this, but the access log has a status for it."""
    return ApiError(499, "the client is gone", code="client_closed")


def timed_out(timeout_s: float) -> ApiError:
    """A request took longer than it may."""
    return ApiError(
        504,
        f"the request took longer than server.request_timeout_s, {timeout_s:g} s",
        code="timeout",
        # a repetition would take as long, and clients repeat 5xx by themselves
        headers={"x-should-retry": "false"},
    )


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    kind, where = first["type"], _path(first["loc"])
    if kind == "json_invalid":
        return invalid(f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    if not where:
        return invalid("the body must be a JSON object", code="invalid_type")
    if kind == "missing":
        return invalid(f"{where}: is missing", param=where, code="missing_required_parameter")
    if where.split(".")[0] in ("prompt", "input") and len(errors) > 1:
        # one error per form that it could have had; the first one alone would mislead
        return invalid(
            f"{first['loc'][0]}: got something else than a text, a list of texts, a list of token "
            "ids, or a list of such lists",
            param=str(first["loc"][0]),
            code="invalid_type",
        )
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    message = f"{where}: {first['msg'].lower()}, got {_short.repr(first['input'])}"
    if kind == "value_error":  # one of our own
        message = f"{where}: {first['msg'].removeprefix('Value error, ')}"
    return invalid(message, param=where, code=code)


def _path(loc: tuple[int | str, ...]) -> str:
    """``messages.0.role``; without the names of a union's members."""
    parts = [str(part) for part in loc if part not in _MEMBERS]
    return ".".join(part for part in parts if part.isidentifier() or part.isdigit())
