"""A guided-decoding backend of a scratch package, in the loop with everything else."""

from collections.abc import Callable
from typing import Any

import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.api import RequestError, StructuredOutputs

OpenLLM = Callable[..., LLM]

CITIES = ("Amsterdam", "Rome", "Romeville", "Paris")
LONG = ("a" * 70, "b" * 64, "ab" * 33)
PROMPTS = ["capital: ", "where to? ", "go to "]


def one_of(choices: tuple[str, ...] = CITIES, **more: Any) -> SamplingParams:
    constraint = StructuredOutputs(choice=choices)
    return SamplingParams(**{"max_tokens": 80, "structured_outputs": constraint, **more})


def texts(llm: LLM, prompts: Any, params: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_constrained_output_is_one_of_the_choices(open_llm: OpenLLM, temperature: float) -> None:
    llm = open_llm(guided_decoding="choice")
    assert llm.components["guided_decoding"] == "choice (acme-plugins 3.1)"
    params = [one_of(temperature=temperature, seed=seed) for seed in range(12)]
    outputs = llm.generate(PROMPTS * 4, params)
    assert {output.outputs[0].text for output in outputs} <= set(CITIES)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_constraint_of_one_request_does_not_touch_those_beside_it(open_llm: OpenLLM) -> None:
    llm = open_llm(guided_decoding="choice")
    free = SamplingParams(temperature=0, max_tokens=12)
    alone = texts(llm, PROMPTS[0], free)
    together = texts(llm, PROMPTS, [free, one_of(), one_of(temperature=0)])
    assert together[:1] == alone
    assert set(together[1:]) <= set(CITIES)


def test_malformed_constraint_fails_that_request_only(open_llm: OpenLLM) -> None:
    llm = open_llm(guided_decoding="choice")
    free = SamplingParams(temperature=0, max_tokens=12)
    params = [free, one_of(("Zürich", "Bern")), one_of()]
    num_free = llm.engine.kv_cache.num_free_blocks
    outputs = llm.generate(PROMPTS, params, on_error="return")
    assert [one.outputs[0].finish_reason for one in outputs][1] == "error"
    assert "choice 'Zürich' is not ASCII; use ASCII texts only" in outputs[1].outputs[0].error
    assert outputs[0].outputs[0].text == texts(llm, PROMPTS[0], free)[0]
    assert outputs[2].outputs[0].text in CITIES
    assert llm.engine.kv_cache.num_free_blocks == num_free


def test_unsupported_constraint_is_refused_with_the_reasons_of_the_backend(
    open_llm: OpenLLM,
) -> None:
    llm = open_llm(guided_decoding="choice")
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    with pytest.raises(RequestError, match=r"regex.*can't be enforced.*beyond this backend"):
        llm.generate(PROMPTS[0], params)


def test_constraint_without_a_backend_is_refused_with_the_remedy(open_llm: OpenLLM) -> None:
    with pytest.raises(RequestError, match=r"set guided_decoding\.name"):
        open_llm(guided_decoding={"name": None}).generate(PROMPTS[0], one_of())


def test_slow_compilation_holds_nobody_else_up(
    open_llm: OpenLLM, acme: Callable[[str], Any]
) -> None:
    llm = open_llm(guided_decoding={"name": "choice", "options": {"is_slow": True}})
    module = acme("acme_choice")
    module.RELEASED.clear()
    finished: list[int] = []

    def release(request: Any) -> None:
        # the compilation waits for the other request to finish: neither could if they took turns
        finished.append(request.num_prompt_tokens)
        module.RELEASED.set()

    llm.on_finish(release)
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(PROMPTS[:2], [one_of(), free])
    assert outputs[0].outputs[0].text in CITIES
    assert finished == [len(PROMPTS[1]), len(PROMPTS[0])]


def test_request_aborted_while_its_constraint_compiles_leaves_nothing(
    open_llm: OpenLLM, acme: Callable[[str], Any]
) -> None:
    llm = open_llm(guided_decoding={"name": "choice", "options": {"is_slow": True}})
    module = acme("acme_choice")
    module.RELEASED.clear()
    # the other request's end takes the waiting one with it
    llm.on_finish(lambda request: llm.engine.abort(list(llm.engine.requests)))
    free = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(PROMPTS[:2], [one_of(), free])
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "length"]
    module.RELEASED.set()
    assert texts(llm, PROMPTS[0], one_of(("Rome",))) == ["Rome"]


def test_preempted_constrained_request_resumes_where_it_was(open_llm: OpenLLM) -> None:
    roomy = open_llm(guided_decoding="choice")
    params = [one_of(LONG, seed=seed) for seed in range(3)]
    expected = texts(roomy, PROMPTS, params)
    tight = open_llm(
        guided_decoding="choice",
        model={"max_model_len": 100},
        cache={"num_blocks": 40, "block_size": 4},
    )
    outputs = tight.generate(PROMPTS, params)
    assert sum(output.outputs[0].metrics.num_preemptions for output in outputs) > 0
    assert [output.outputs[0].text for output in outputs] == expected
    assert set(expected) <= set(LONG)


def oracle_texts(llm: LLM, choices: tuple[str, ...]) -> list[list[int]]:
    """Every prompt with a choice; one tail is against the constraint."""
    right = [[*llm.tokenizer.encode(one + choice)] for one in PROMPTS for choice in choices]
    return [*right, [*right[0][:-3], 0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("tight", [False, True])
def test_constrained_text_is_the_same_with_drafts(open_llm: OpenLLM, tight: bool) -> None:
    sections: dict[str, Any] = {"guided_decoding": "choice", "model": {"max_model_len": 100}}
    if tight:
        sections["cache"] = {"num_blocks": 40, "block_size": 4}
    plain = open_llm(**sections)
    choices = LONG[:1]
    params = [one_of(choices), one_of(choices, temperature=0), one_of(choices, seed=3)]
    expected = texts(plain, PROMPTS, params)
    options = {"texts": oracle_texts(plain, choices), "num_draft_tokens": 5}
    drafts = {"name": "oracle", "options": options, "adaptive": False}
    llm = open_llm(spec_decode=drafts, **sections)
    outputs = llm.generate(PROMPTS, params)
    assert [output.outputs[0].text for output in outputs] == expected == list(choices) * 3
    assert all(output.outputs[0].metrics.num_accepted_tokens > 40 for output in outputs)


def test_drafts_against_the_constraint_are_cut_before_they_are_verified(open_llm: OpenLLM) -> None:
    prompt_ids = list(PROMPTS[0].encode())
    draft = [*prompt_ids, *b"Rome is not a choice"]
    options = {"texts": [draft], "num_draft_tokens": 8}
    llm = open_llm(
        guided_decoding="choice",
        spec_decode={"name": "oracle", "options": options, "adaptive": False},
    )
    (output,) = llm.generate([prompt_ids], one_of(("Romeville", "Rome was")))
    metrics = output.outputs[0].metrics
    assert output.outputs[0].text in ("Romeville", "Rome was")
    assert metrics.num_draft_tokens <= len("Rome ") - 1


def test_ngram_drafts_change_nothing_about_constrained_text(open_llm: OpenLLM) -> None:
    prompts = [f"{LONG[2]} {LONG[2]} ", f"{LONG[0]} "]
    params = [one_of(LONG, seed=1, max_tokens=90), one_of(LONG, temperature=0, max_tokens=90)]
    expected = texts(open_llm(guided_decoding="choice"), prompts, params)
    llm = open_llm(guided_decoding="choice", spec_decode={"name": "ngram", "adaptive": False})
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].text for output in outputs] == expected
    assert set(expected) <= set(LONG)
    assert sum(output.outputs[0].metrics.num_accepted_tokens for output in outputs) > 0
