"""Constraints through the engine: neighbours, drafts, bad ones, several backends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.api import RequestError, StructuredOutputs

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
    },
    {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 6},
]


def params(**constraint: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=48, structured_outputs=StructuredOutputs(**constraint)
    )


def texts(llm: LLM, prompts: Any, params: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


GOOD = {"choice": ("yes", "no")}


def test_eight_constrained_requests_get_the_same_text_with_and_without_drafts(llm: LLM) -> None:
    prompts = [f"Number {index} of people as JSON, again and again: {{" for index in range(8)]
    wanted = [params(json=json.dumps(SCHEMAS[index % 2])) for index in range(8)]
    expected = texts(llm, prompts, wanted)
    for schema, text in zip(SCHEMAS * 4, expected, strict=True):
        assert isinstance(json.loads(text), dict if schema["type"] == "object" else list)
    options = {"num_draft_tokens": 4, "min_ngram": 1}
    sections: dict[str, Any] = {
        "spec_decode": {"name": "ngram", "options": options, "adaptive": False}
    }
    with LLM(dtype="float32", max_model_len=1024, **sections) as drafting:
        outputs = drafting.generate(prompts, wanted)
    assert [output.outputs[0].text for output in outputs] == expected
    assert sum(output.outputs[0].metrics.num_draft_tokens for output in outputs) > 0


def test_tokens_that_a_constraint_forces_save_steps_and_change_nothing(llm: LLM) -> None:
    prompts = ["People as JSON: ", "Numbers as JSON: ", "A person: "]
    schemas = [json.dumps(SCHEMAS[index % 2]) for index in range(3)]
    wanted = [
        SamplingParams(
            temperature=temperature,
            seed=5,
            max_tokens=40,
            structured_outputs=StructuredOutputs(json=schema, backend=backend),
        )
        for temperature, schema, backend in zip(
            (0.0, 0.0, 1.0), schemas, ("xgrammar", "llguidance", "llguidance"), strict=True
        )
    ]
    sections: dict[str, Any] = {
        "guided_decoding": {"name": "xgrammar", "others": ["llguidance"], "jump_forward": False}
    }
    with LLM(dtype="float32", max_model_len=1024, **sections) as stepping:
        expected = stepping.generate(prompts, wanted)
    outputs = llm.generate(prompts, wanted)
    for one, other in zip(outputs, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert other.outputs[0].metrics.num_draft_tokens == 0
    kept = [output.outputs[0].metrics.num_accepted_tokens for output in outputs]
    assert kept[0] > 0
    assert kept[2] > 0


def test_a_request_picks_its_backend_and_unknown_ones_are_listed(llm: LLM) -> None:
    lark = params(grammar='start: "yes" | "no"', backend="llguidance")
    assert texts(llm, "Is water wet? ", lark)[0] in ("yes", "no")
    ebnf = params(grammar='root ::= "yes" | "no"')
    assert texts(llm, "Is water wet? ", ebnf)[0] in ("yes", "no")
    with pytest.raises(
        RequestError,
        match=r"backend: got 'outlines', allowed: 'xgrammar', 'llguidance', the loaded backends",
    ) as raised:
        llm.generate("x", params(regex="a", backend="outlines"))
    assert raised.value.field == "structured_outputs.backend"


HOSTILE: dict[str, dict[str, Any]] = {
    "empty schema text": {"json": " "},
    "empty enum": {"json": '{"enum": []}'},
    "endless reference": {"json": '{"$ref": "#"}'},
    "endless object": {
        "json": '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'
    },
    "endless grammar": {"grammar": 'root ::= root "a" | root'},
    "grammar that names nothing": {"grammar": "root ::= nowhere"},
    "deep schema": {"json": '{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000},
    "deep grammar": {"grammar": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000},
    "deep pattern": {"regex": "(" * 10_000 + "a" + ")" * 10_000},
    "catastrophic pattern": {"regex": "(a+)+(a|aa|aaa)*b" * 30},
    "huge repetition": {"regex": "((abc|de){1,1000}){1,1000000}"},
    "huge schema": {"json": json.dumps({"enum": ["x" * 20 + str(one) for one in range(100_000)]})},
    "many properties": {
        "json": json.dumps(
            {"type": "object", "properties": {f"k{one}": {"type": "null"} for one in range(30_000)}}
        )
    },
    "unknown keyword": {"json": '{"type": "string", "minLenght": 3}'},
    "half a surrogate pair": {"json": '{"const": "\\ud800"}'},
    "half a surrogate pair as text": {"regex": "a\ud800"},
    "unbalanced pattern": {"regex": "(a[b"},
    "lookahead": {"regex": "(?=a)b"},
    "remote reference": {"json": '{"$ref": "http://example.com/schema.json"}'},
    "wrong type of a keyword": {"json": '{"type": "object", "required": "x"}'},
    "nothing is both": {"json": '{"type": "integer", "enum": ["a"]}'},
    "zero byte": {"grammar": 'root ::= "\x00'},
}


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraint_is_refused_or_enforced_and_touches_nobody(
    llm: LLM, name: str, backend: str
) -> None:
    num_free = llm.engine.kv_cache.num_free_blocks
    bad = params(**HOSTILE[name], backend=backend)
    prompts = ["Is water wet? "] * 3
    outputs = llm.generate(prompts, [params(**GOOD), bad, params(**GOOD)], on_error="return")
    first, middle, last = (output.outputs[0] for output in outputs)
    assert {first.text, last.text} <= {"yes", "no"}
    if middle.error is None:
        assert middle.finish_reason in ("stop", "length")
    else:
        assert "structured_outputs" in middle.error or "structured output" in middle.error
        assert len(middle.error) < 600
    assert texts(llm, prompts[0], params(**GOOD))[0] in ("yes", "no")
    assert llm.engine.kv_cache.num_free_blocks == num_free
    assert llm.engine.executor.call("num_requests").result() == 0


UNICODE = ("Zürich", "日本語", "\U0001f600\U0001f680", "a\u0000b", "line\nbreak\t\x07", 'quote"\\')


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("text", UNICODE)
def test_unicode_and_control_characters_come_out_as_they_went_in(
    llm: LLM, backend: str, text: str
) -> None:
    assert texts(llm, "Say: ", params(choice=(text,), backend=backend)) == [text]
    (found,) = texts(llm, "Say: ", params(json=json.dumps({"enum": [text]}), backend=backend))
    assert json.loads(found) == text


@pytest.fixture
def open_llm() -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def make(**guided: Any) -> LLM:
        sections: dict[str, Any] = {"guided_decoding": guided}
        opened.append(LLM(quantization="gguf", max_model_len=512, **sections))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_what_one_backend_refuses_goes_to_the_next_if_that_is_configured(
    open_llm: Callable[..., LLM],
) -> None:
    schema = json.dumps({"type": "string", "pattern": "^a+$", "maxLength": 3})
    llm = open_llm(name="xgrammar", others=["llguidance"], fallback=True)
    assert texts(llm, "Say: ", params(json=schema))[0] in ('"a"', '"aa"', '"aaa"')
    with pytest.raises(RequestError, match=r"maxLength: not enforced by xgrammar beside pattern"):
        llm.generate("Say: ", params(json=schema, backend="xgrammar"))


def test_constraint_that_is_too_long_is_refused_with_the_limit(
    open_llm: Callable[..., LLM],
) -> None:
    llm = open_llm(max_spec_bytes=20)
    assert texts(llm, "Say: ", params(regex="a{3}")) == ["aaa"]
    with pytest.raises(
        RequestError, match=r"regex: has 21 bytes but guided_decoding\.max_spec_bytes is 20"
    ):
        llm.generate("Say: ", params(regex="a" * 21))
