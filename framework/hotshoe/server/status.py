"""Endpoints for operators: is it alive, how busy is it, what is it made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Response

from hotshoe import __version__
from hotshoe.entrypoints.async_llm import AsyncLLM
from hotshoe.errors import RequestError
from hotshoe.server.openai.errors import ApiError
from hotshoe.server.openai.streaming import json_response

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECRET = "***"


class Status:
    """Answers about an engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def health(self) -> Response:
        """200 while the engine lives, else 503."""
        self._check_alive()
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        """200 if new requests are taken: neither dead nor draining."""
        self._check_alive()
        if self._llm.heartbeat.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining")
        return json_response({"status": "ready"})

    async def version(self) -> Response:
        """The version of hotshoe."""
        return json_response({"version": __version__})

    async def metrics(self) -> Response:
        """Counters and timings in Prometheus' text format, over all API server processes."""
        return Response(await self._call("metrics"), media_type=METRICS_TYPE)

    async def load(self) -> Response:
        """How busy the engine is."""
        return json_response(await self._call("load"))

    async def server_info(self) -> Response:
        """Versions, plugins and configuration, without secrets."""
        facts = self._llm.facts
        return json_response(
            {
                "version": __version__,
                "components": facts.components,
                "plugins": [
                    {name: getattr(one, name) for name in one.__struct_fields__}
                    for one in facts.plugins
                ],
                "engine": {
                    "vocab_size": facts.vocab_size,
                    "max_model_len": facts.max_model_len,
                    "block_size": facts.block_size,
                    "num_blocks": facts.num_blocks,
                    "dtype": facts.dtype,
                    "device": facts.device,
                },
                "config": _shown_config(self._llm),
            }
        )

    async def reset_prefix_cache(self) -> Response:
        """Forget every cached prefix; false if requests that hold blocks kept it from that."""
        return json_response({"was_reset": await self._call("reset_prefix_cache")})

    async def start_profile(self) -> Response:
        """Start to profile the engine core."""
        return json_response({"result": await self._call("start_profile")})

    async def stop_profile(self) -> Response:
        """Stop that, and say where the profile lies."""
        return json_response({"result": await self._call("stop_profile")})

    def _check_alive(self) -> None:
        if self._llm.death is not None:
            raise ApiError(503, f"the engine has stopped: {self._llm.death}", code="engine_dead")

    async def _call(self, method: str) -> Any:
        try:
            return await self._llm.call(method)
        except RequestError as error:
            # not the client's fault: it only asked
            raise ApiError(503, str(error), code="unavailable") from error


def status_router(llm: AsyncLLM) -> APIRouter:
    """Probes, metrics, and, if ``server.dev_endpoints`` allows it, what changes the engine."""
    status = Status(llm)
    router = APIRouter()
    reads: dict[str, Callable[[], Awaitable[Response]]] = {
        "/health": status.health,
        "/ready": status.ready,
        "/ping": status.health,
        "/version": status.version,
        "/metrics": status.metrics,
        "/load": status.load,
        "/server_info": status.server_info,
    }
    for path, handler in reads.items():
        router.add_api_route(path, handler, name=path[1:], operation_id=path[1:])
    for path in ("/health", "/ready", "/ping"):  # some load balancers ask so
        router.add_api_route(path, reads[path], methods=["HEAD"], include_in_schema=False)
    if llm.config.server.dev_endpoints:
        for name in ("reset_prefix_cache", "start_profile", "stop_profile"):
            router.add_api_route(f"/{name}", getattr(status, name), methods=["POST"])
    return router


def _shown_config(llm: AsyncLLM) -> dict[str, Any]:
    config = llm.config.model_dump(mode="json")
    server = config["server"]
    server["api_keys"] = [_SECRET] * len(server["api_keys"])
    return config
