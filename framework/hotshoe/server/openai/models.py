"""``GET /v1/models``."""

from __future__ import annotations

import time
from typing import Any

from starlette.responses import Response

from hotshoe.server.openai.service import Service
from hotshoe.server.openai.streaming import json_response


class Models:
    """The list of served names; all are the same model."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def all(self) -> Response:
        """Every name."""
        cards = [self._card(name) for name in self._service.model_names]
        return json_response({"object": "list", "data": cards})

    async def one(self, model_id: str) -> Response:
        """One of them.

        Raises:
            ApiError: if it isn't served.
        """
        return json_response(self._card(self._service.model_name(model_id)))

    def _card(self, name: str) -> dict[str, Any]:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "hotshoe",
            "root": service.llm.config.model.path,
            "max_model_len": service.llm.facts.max_model_len,
        }
