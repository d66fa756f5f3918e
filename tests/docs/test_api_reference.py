"""The reference of the HTTP API names everything that there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotshoe.server.openai import schemas

TEXT = (Path(__file__).parents[2] / "docs/reference/api.md").read_text("utf-8")
KINDS = (
    schemas.CompletionRequest,
    schemas.ChatRequest,
    schemas.ResponsesRequest,
    schemas.TokenizeRequest,
    schemas.DetokenizeRequest,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_parameter_is_in_the_reference(kind: type[schemas.ApiRequest]) -> None:
    assert [name for name in kind.model_fields if f"`{name}`" not in TEXT] == []


def test_every_option_of_a_stream_is_in_the_reference() -> None:
    assert [one for one in schemas.StreamOptions.model_fields if f"`{one}`" not in TEXT] == []
