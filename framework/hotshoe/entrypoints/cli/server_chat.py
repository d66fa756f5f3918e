"""The model of ``hotshoe chat --url``: one that a server runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hotshoe.bench.serve import served_model, unreachable
from hotshoe.entrypoints.cli.chat import ChatAnswer
from hotshoe.entrypoints.cli.session import Interrupted
from hotshoe.errors import RequestError
from hotshoe.http_client import Answer, HttpClient, error_message


class ServerModel:
    """Asks a server's chat completions. Use as a context manager.

    Args:
        url: of the server.
        api_key: if it wants one.
        name: of the model; None: the first that it lists.
        sampling: fields of every request.
    """

    def __init__(
        self, url: str, api_key: str | None, name: str | None, sampling: Mapping[str, Any]
    ) -> None:
        self._client = HttpClient(url, api_key=api_key)
        self._name = name
        self._sampling = {name: _as_sent(value) for name, value in sampling.items()}
        self._runner = asyncio.Runner()

    def __enter__(self) -> ServerModel:
        """Look up the model, so that a wrong URL is known before the first message.

        Raises:
            UnavailableError: if the server can't be reached.
        """
        try:
            first = self._runner.run(served_model(self._client))
        except BaseException:
            self._runner.close()
            raise
        self._name = self._name or first
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def answer(self, messages: Sequence[Mapping[str, str]]) -> ChatAnswer:
        """Print the answer as it comes.

        Raises:
            RequestError: with what the server says.
            UnavailableError: if it can't be reached.
            Interrupted: on Ctrl-C; the request is aborted.
        """
        pieces: list[str] = []
        try:
            finish_reason = self._runner.run(self._stream(messages, pieces))
        except KeyboardInterrupt:
            raise Interrupted("".join(pieces)) from None
        except OSError as error:
            raise unreachable(self._client, error) from error
        cut_off = None
        if finish_reason == "length":
            is_limited = self._sampling.get("max_tokens") is not None
            full = "the context is full; /reset starts a new conversation"
            cut_off = "max_tokens was reached" if is_limited else full
        return ChatAnswer("".join(pieces), cut_off)

    async def _stream(self, messages: Sequence[Mapping[str, str]], pieces: list[str]) -> str | None:
        """Print and collect the pieces; returns the finish reason."""
        body = {"model": self._name, "messages": messages, "stream": True, **self._sampling}
        finish_reason = None
        async with self._client.stream("POST", "/v1/chat/completions", body) as response:
            if response.status != 200:
                content = b"".join([part async for part in response.parts()])
                answer = Answer(response.status, response.headers, content)
                raise RequestError(f"the server answered {answer.status}: {answer.error_message}")
            try:
                async for data in response.events():
                    for choice in _choices(data):
                        piece = choice["delta"].get("content") or ""
                        pieces.append(piece)
                        print(piece, end="", flush=True)
                        finish_reason = choice.get("finish_reason") or finish_reason
            finally:
                print(flush=True)
        return finish_reason


def _choices(data: bytes) -> list[dict[str, Any]]:
    """The choices of an event.

    Raises:
        RequestError: if it reports an error.
    """
    if data == b"[DONE]":
        return []
    event = json.loads(data)
    if said := error_message(event):
        raise RequestError(said)
    return event.get("choices") or []


def _as_sent(value: Any) -> Any:
    """A record as the fields that are set, anything else as it is."""
    if not isinstance(value, msgspec.Struct):
        return value
    fields = msgspec.to_builtins(value)
    return {name: one for name, one in fields.items() if one is not None}
