"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from hotshoe.server.openai.errors import invalid
from hotshoe.server.openai.prompts import MAX_INLINE_LENGTH, chat_prompt
from hotshoe.server.openai.schemas import DetokenizeRequest, TokenizeRequest
from hotshoe.server.openai.service import Service
from hotshoe.server.openai.streaming import json_response


async def tokenize(service: Service, request: Request) -> Response:
    """Token ids of a text or a conversation, as a completion would see them."""
    body = await service.parse(request, TokenizeRequest)
    token_ids = await _token_ids(service, body)
    tokenizer = service.llm.tokenizer
    answer = {
        "count": len(token_ids),
        "max_model_len": service.llm.facts.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [
            tokenizer.decode([one], skip_special_tokens=False) for one in token_ids
        ]
    return json_response(answer)


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids."""
    body = await service.parse(request, DetokenizeRequest)
    limit = service.llm.facts.vocab_size
    largest = max(body.tokens, default=0)
    if largest >= limit:
        raise invalid(
            f"tokens: token id {largest} is out of range; the model has 0 to {limit - 1}",
            param="tokens",
            code="invalid_value",
        )
    skip = bool(body.skip_special_tokens)
    text = await asyncio.to_thread(
        service.llm.tokenizer.decode, body.tokens, skip_special_tokens=skip
    )
    return json_response({"prompt": text})


async def _token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("send either prompt or messages", param="prompt", code="invalid_value")
    if body.messages is not None:
        return (await chat_prompt(service, body, body.messages)).token_ids
    assert body.prompt is not None
    special = body.add_special_tokens is not False
    encode = service.llm.tokenizer.encode
    if len(body.prompt) <= MAX_INLINE_LENGTH:
        return encode(body.prompt, add_special_tokens=special)
    return await asyncio.to_thread(encode, body.prompt, add_special_tokens=special)
