"""The page on tool calls: its parser keeps the contract, its settings are known."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from hotshoe.api import Component, GuidedDecodingBackend, GuidedDecodingContext, ToolChoice
from hotshoe.config import load_config
from hotshoe.testing.parsers import CHOICE, WEATHER, ToolParserConformance
from hotshoe_guided_decoding import xgrammar

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "tool-calls.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def page_parser() -> ModuleType:
    (source,) = [one for one in blocks("python") if "hotshoe_component" in one]
    module = ModuleType("call_lines")
    exec(source, vars(module))
    return module


class TestTheParserOfThePage(ToolParserConformance):
    allows_text_before = False  # it keeps the spaces before a call

    def component(self) -> Component:
        found: Component = page_parser().hotshoe_component()
        return found

    def test_it_constrains_what_must_be_a_call_and_nothing_else(self) -> None:
        spec = self.parser().constraint(ToolChoice(tools=(WEATHER,), is_required=True))
        assert spec is not None
        component = xgrammar.hotshoe_component()
        token_bytes = [*(bytes([byte]) for byte in range(256)), b""]
        context = GuidedDecodingContext(
            vocab_size=257, token_bytes=token_bytes, eos_token_ids=(256,)
        )
        backend: GuidedDecodingBackend = component.factory(component.options(), context)
        assert backend.unsupported(spec) == []
        matcher = backend.compile(spec).matcher()
        assert matcher.accept([*b'CALL get_weather {"city": "Oslo"}\n', 256])
        assert not backend.compile(spec).matcher().accept([*b"It is sunny"])
        assert self.parser().constraint(CHOICE) is None


def test_the_settings_are_known() -> None:
    found: list[dict[str, Any]] = [yaml.safe_load(block) for block in blocks("yaml")]
    for settings in found:
        config = load_config(overrides=settings, env={}).config
        parser = config.server.reasoning_parser
        assert parser.name in ("auto", "think_tags")
    assert parser.options == {"is_start_tag_optional": True}
