import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hotshoe import LLM
from hotshoe.api import Component, GrammarSpec, GuidedDecodingBackend, GuidedDecodingContext
from hotshoe_guided_decoding import llguidance, xgrammar

NUM_BYTES = 256
COMPONENTS: dict[str, Callable[[], Component]] = {
    "xgrammar": xgrammar.hotshoe_component,
    "llguidance": llguidance.hotshoe_component,
}


class Walker:
    """A backend over a tokenizer with a token per byte."""

    def __init__(self, name: str, **options: Any) -> None:
        component = COMPONENTS[name]()
        context = GuidedDecodingContext(
            vocab_size=NUM_BYTES + 1,
            token_bytes=[*(bytes([byte]) for byte in range(NUM_BYTES)), b""],
            eos_token_ids=(NUM_BYTES,),
        )
        built = component.factory(component.options(**options), context)
        assert isinstance(built, GuidedDecodingBackend)
        self.name = name
        self.backend = built

    def reasons(self, schema: Any) -> list[str]:
        return self.backend.unsupported(GrammarSpec(kind="json", value=json.dumps(schema)))

    def takes(self, spec: GrammarSpec, text: str) -> bool:
        """Whether a text may be the whole output."""
        assert self.backend.unsupported(spec) == []
        grammar = self.backend.compile(spec).matcher()
        return grammar.accept([*text.encode(), NUM_BYTES])

    def takes_json(self, schema: Any, value: Any) -> bool:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return self.takes(GrammarSpec(kind="json", value=json.dumps(schema)), text)


@pytest.fixture(params=["xgrammar", "llguidance"], scope="session")
def walker(request: pytest.FixtureRequest) -> Walker:
    return Walker(request.param)


@pytest.fixture(scope="session")
def make_walker() -> Callable[..., Walker]:
    return Walker


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The embedded model, with both backends."""
    sections: dict[str, Any] = {"guided_decoding": {"name": "xgrammar", "others": ["llguidance"]}}
    with LLM(dtype="float32", max_model_len=1024, **sections) as made:
        yield made
