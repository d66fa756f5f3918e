"""``Service``: what all handlers share."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from hotshoe import __version__
from hotshoe.api import SamplingParams
from hotshoe.entrypoints.async_llm import AsyncLLM
from hotshoe.server.gate import exchange_of
from hotshoe.server.openai.errors import ApiError, client_gone, from_validation
from hotshoe.server.openai.logprobs import LogprobsWriter
from hotshoe.server.openai.schemas import ApiRequest, GenerateRequest, ResponsesRequest
from hotshoe.server.openai.unsupported import FieldChecker
from hotshoe.server.parsers import load_parsers
from hotshoe.tracing import RequestSpan, configure_tracing, start_request_span

logger = logging.getLogger(__name__)

MAX_UPLOAD_S = 60.0
"""How long a body may take to arrive."""

AnyRequest = TypeVar("AnyRequest", bound=ApiRequest)


class Service:
    """An engine and the rules under which clients may use it.

    Attributes:
        config: of the server.
        model_names: what clients may call the model; the first is the default.
        fingerprint: changes when the same seed may give other tokens.
        logprobs: writes log probabilities of this model's tokens.
        parsers: read tool calls and reasoning.
        tracing: where spans go; None: nowhere.

    Raises:
        ConfigError: if traces are wanted but can't be sent, or a parser can't be used.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.config = llm.config.server
        self.model_names = self.config.served_model_name or (llm.config.model.path,)
        self.fingerprint = _fingerprint(llm)
        self.logprobs = LogprobsWriter(llm.tokenizer)
        self.parsers = load_parsers(llm.config, llm.tokenizer)
        self.tracing = configure_tracing(llm.config)
        self._fields = FieldChecker(self.config.unknown_fields)

    async def parse(self, request: Request, kind: type[AnyRequest]) -> AnyRequest:
        """A request's body, checked as far as that needs no engine.

        Raises:
            ApiError: if it is no JSON of that kind, or names a field or model that isn't served.
        """
        media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            # also keeps web pages out: a browser asks before it sends this type elsewhere
            raise ApiError(
                415,
                f"content-type is {media_type!r:.100}, allowed: 'application/json'",
                code="unsupported_media_type",
            )
        body = await _read(request, self.config.request_timeout_s)
        try:
            parsed = kind.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error) from error
        warnings = self._fields.check(parsed)
        exchange_of(request.scope).headers += [("warning", one) for one in warnings]
        self.model_name(parsed.model)
        if self.config.log_prompts:
            logger.debug("request %s: %r", request_name(request, parsed), parsed)
        return parsed

    def span(
        self,
        operation: str,
        request: Request,
        body: GenerateRequest | ResponsesRequest,
        params: SamplingParams,
    ) -> RequestSpan:
        """Begin the span of a request in a trace."""
        return start_request_span(
            self.tracing,
            request.headers,
            operation=operation,
            model=self.model_name(body.model),
            request_id=exchange_of(request.scope).request_id,
            params=params,
            stream=bool(body.stream),
        )

    def model_name(self, wanted: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: if no such model is served.
        """
        if wanted is None:
            return self.model_names[0]
        if wanted not in self.model_names:
            known = ", ".join(repr(name) for name in self.model_names)
            raise ApiError(
                404,
                f"the model {wanted!r:.200} does not exist; served here: {known}",
                param="model",
                code="model_not_found",
            )
        return wanted


async def _read(request: Request, timeout_s: float | None) -> bytes:
    limit_s = min(timeout_s or MAX_UPLOAD_S, MAX_UPLOAD_S)
    try:
        async with asyncio.timeout(limit_s):
            return await request.body()
    except TimeoutError as error:
        message = f"the body didn't arrive within {limit_s:g} s"
        raise ApiError(408, message, code="timeout", headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise client_gone() from error


def request_name(request: Request, parsed: ApiRequest) -> str:
    """What a request is called in logs and ids: what its body says, or its ``X-Request-Id``."""
    own = getattr(parsed, "request_id", None)
    return own if isinstance(own, str) else exchange_of(request.scope).request_id


def new_id(prefix: str, own: str | None) -> str:
    """An id for a response; with the client's own name in it, if it gave one."""
    return prefix + (uuid.uuid4().hex if own is None else own)


def _fingerprint(llm: AsyncLLM) -> str:
    facts = llm.facts
    parts = [__version__, llm.config.model.path, facts.dtype, facts.device]
    parts += [f"{one.kind}/{one.name} {one.distribution} {one.version}" for one in facts.plugins]
    return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]
