"""``SamplingParams``: what is accepted, what is refused and with which words."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel

from hotshoe.api import RequestError, SamplingParams, SamplingParamsError, StructuredOutputs
from hotshoe.api.sampling_params import check_vocab

NOT_WHOLE = [True, 1.5, 1.0, "3", None, math.nan, [1]]
NOT_NUMBERS = [True, "0.5", None, math.nan, math.inf, -math.inf, [1.0], 1j, 10**400]
REFUSED = [
    ("n", [*NOT_WHOLE, 0, -1, 16_385]),
    ("temperature", [*NOT_NUMBERS, -0.1, 100.5]),
    ("top_k", [*NOT_WHOLE, -2, -5]),
    ("top_p", [*NOT_NUMBERS, 0, 0.0, -1, 1.0001]),
    ("min_p", [*NOT_NUMBERS, -0.01, 1.01]),
    ("repetition_penalty", [*NOT_NUMBERS, 0, -1, 101]),
    ("presence_penalty", [*NOT_NUMBERS, -2.1, 2.1]),
    ("frequency_penalty", [*NOT_NUMBERS, -2.1, 2.1]),
    (
        "logit_bias",
        [3, [1], "x", {"1": 1.0}, {True: 1.0}, {-1: 1.0}, {2**31: 1.0}]
        + [{1: bias} for bias in (101, -101, math.nan, "1", True, None)],
    ),
    ("bad_words", [[""], [1], None, {"a": 1}]),
    ("bad_words_token_ids", [[[]], [1], [["1"]], [[-1]], None]),
    ("allowed_token_ids", [[], [-1], ["1"], [True], [1, 1], 5, "12", {1}]),
    ("max_tokens", [*[value for value in NOT_WHOLE if value is not None], 0, -1]),
    ("min_tokens", [*NOT_WHOLE, -1]),
    ("stop", [[""], "", [1], None, 5, {"a": 1}]),
    ("stop_token_ids", [[-1], ["1"], [True], [3, 3], None, 5, "12"]),
    ("include_stop_str_in_output", [1, "true", None]),
    ("ignore_eos", [1, 0, "false", None]),
    ("seed", [True, 1.5, "1", -1, 2**64]),
    ("logprobs", [True, "1", -2, 0.5]),
    ("prompt_logprobs", [True, "1", -2, 0.5]),
    ("skip_special_tokens", [1, None]),
    ("detokenize", [0, None]),
    ("logits_processors", [[""], ["a", "a"], [1], None]),
    ("structured_outputs", [{}, {"json": "{}"}, "json"]),
    ("extra_args", [[], "x", {1: 2}]),
]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED for value in values]
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert caught.value.allowed
    assert str(caught.value).startswith(f"{field}: got ")
    assert isinstance(caught.value, (RequestError, ValueError))


ACCEPTED = [
    ("temperature", [0, 0.0, 1, 2.5, 100]),
    ("top_k", [-1, 0, 1, 10**9]),
    ("top_p", [1, 1.0, 1e-9]),
    ("min_p", [0, 1]),
    ("repetition_penalty", [0.01, 1, 100]),
    ("presence_penalty", [-2, 2]),
    ("logit_bias", [None, {}, {0: -100, 7: 100.0}]),
    ("max_tokens", [None, 1, 10**9]),
    ("seed", [None, 0, 2**64 - 1]),
    ("logprobs", [None, -1, 0, 5]),
    ("extra_args", [None, {}, {"entropy": [1, 2]}]),
]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in ACCEPTED for value in values]
)
def test_a_value_at_the_edge_is_accepted_and_kept(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_defaults_are_valid() -> None:
    assert SamplingParams().temperature == 1.0


def test_message_names_field_value_and_what_is_allowed() -> None:
    with pytest.raises(SamplingParamsError, match=r"^top_p: got 0, allowed: above 0, at most 1$"):
        SamplingParams(top_p=0)
    with pytest.raises(SamplingParamsError, match=r"^seed: got -1, allowed: 0 to 1844674407370955"):
        SamplingParams(seed=-1)


def test_a_single_stop_string_and_lists_become_tuples() -> None:
    params = SamplingParams(
        stop="end",  # type: ignore[arg-type]
        stop_token_ids=[1, 2],  # type: ignore[arg-type]
        bad_words=["a", "b"],  # type: ignore[arg-type]
        bad_words_token_ids=[[1], [2, 3]],  # type: ignore[arg-type]
        allowed_token_ids=[4],  # type: ignore[arg-type]
        logits_processors=["one"],  # type: ignore[arg-type]
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.bad_words == ("a", "b")
    assert params.bad_words_token_ids == ((1,), (2, 3))
    assert params.allowed_token_ids == (4,)
    assert params.logits_processors == ("one",)


def test_numpy_numbers_become_plain_ones() -> None:
    ids = [np.int64(3), np.int32(5)]
    params = SamplingParams(
        stop_token_ids=tuple(ids),
        bad_words_token_ids=(tuple(ids),),
        top_p=np.float32(0.5),  # type: ignore[arg-type]
        logit_bias={np.int64(1): np.float32(2)},  # type: ignore[dict-item]
    )
    assert [type(token_id) for token_id in params.stop_token_ids] == [int, int]
    assert type(params.top_p) is float
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_min_tokens_above_max_tokens_is_refused_with_both() -> None:
    with pytest.raises(SamplingParamsError, match=r"min_tokens: got 20, .* which is 16$"):
        SamplingParams(min_tokens=20)
    assert SamplingParams(min_tokens=20, max_tokens=None).min_tokens == 20


def test_stop_strings_need_detokenization() -> None:
    with pytest.raises(SamplingParamsError, match="none unless detokenize is true"):
        SamplingParams(stop=("x",), detokenize=False)


def test_params_survive_msgpack_and_are_checked_again() -> None:
    params = SamplingParams(
        n=2,
        logit_bias={5: -1.5},
        stop=("a",),
        seed=2**64 - 1,
        structured_outputs=StructuredOutputs(choice=("yes", "no")),
        extra_args={"any": [1, {"deep": None}]},
    )
    decoder = msgspec.msgpack.Decoder(SamplingParams)
    assert decoder.decode(msgspec.msgpack.encode(params)) == params
    with pytest.raises(msgspec.ValidationError, match="top_k: got -5"):
        decoder.decode(msgspec.msgpack.encode({"top_k": -5}))
    with pytest.raises(msgspec.ValidationError, match="unknown field `topk`"):
        decoder.decode(msgspec.msgpack.encode({"topk": 5}))


def test_errors_survive_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(SamplingParamsError("n", 0, "a whole number")))
    assert (error.field, error.value, error.allowed) == ("n", 0, "a whole number")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"json": "{}", "regex": "a"},
        {"json": ""},
        {"json": ["object"]},
        {"json": {"const": float("nan")}},
        {"json": {"const": object}},
        {"json": object},
        {"structural_tag": 5},
        {"json_object": False},
        {"backend": "xgrammar"},
        {"regex": "a", "backend": ""},
        {"choice": []},
        {"choice": "yes"},
        {"choice": [""]},
        {"regex": 5},
    ],
)
def test_a_constraint_that_is_none_several_or_empty_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SamplingParamsError, match=r"^structured_outputs"):
        StructuredOutputs(**given)


def test_schemas_become_texts_whatever_they_are_given_as() -> None:
    class Sky(BaseModel):
        colour: str

    schema = Sky.model_json_schema()
    text = json.dumps(schema)
    for given in (Sky, schema, text):
        constraint = StructuredOutputs(json=given)
        assert constraint.json == text
        data = msgspec.msgpack.encode(constraint)
        assert msgspec.msgpack.decode(data, type=StructuredOutputs) == constraint
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "é"}}
    assert json.loads(StructuredOutputs(structural_tag=tag).structural_tag) == tag


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("logit_bias", SamplingParams(logit_bias={9: 1.0, 10: 1.0})),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=(1, 10))),
        ("stop_token_ids", SamplingParams(stop_token_ids=(10,))),
        ("bad_words_token_ids", SamplingParams(bad_words_token_ids=((1,), (2, 10)))),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(field: str, params: SamplingParams) -> None:
    check_vocab(params, 11)
    with pytest.raises(SamplingParamsError, match=f"^{field}: got 10, allowed: token ids below 10"):
        check_vocab(params, 10)
