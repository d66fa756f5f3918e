"""``TokenSampler`` on a GPU that isn't there: the tokens of the CPU, and nothing that waits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from hotshoe.api import (
    Candidates,
    NewRequest,
    PluginContractError,
    SampleInput,
    Sampler,
    SamplingParams,
    StructuredOutputs,
    gumbel_max,
)
from hotshoe.testing.no_syncs import PretendGpu, PretendStreams
from hotshoe.worker.sampling import (
    StartedSampling,
    TokenSampler,
    prompt_logprobs,
    score_prompt,
)
from unit.sampling_harness import (
    PARAMS,
    VOCAB_SIZE,
    Drafter,
    Harness,
    ListGrammar,
    OddsOnly,
    Running,
    every_kind,
    model,
    no_drafts,
    outcomes,
    some_drafts,
    standard_sampler,
    step_of,
)


@pytest.mark.parametrize("drafter", [no_drafts, some_drafts])
def test_requests_of_every_kind_get_what_they_get_on_the_cpu(drafter: Drafter) -> None:
    for params in every_kind():
        found, expected = outcomes(PretendGpu(), params, drafter), outcomes(None, params, drafter)
        assert found == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(top_p=0.5, min_p=0.1, logprobs=3), False),
        (SamplingParams(logit_bias={1: 2.0}, allowed_token_ids=(1, 2), min_tokens=4), False),
        (SamplingParams(bad_words_token_ids=((9,),)), False),
        (SamplingParams(bad_words_token_ids=((9,), (4, 4))), True),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(logits_processors=("odds",)), True),
        (SamplingParams(structured_outputs=StructuredOutputs(regex="a")), True),
    ],
)
def test_history_is_needed_where_the_next_token_depends_on_the_last_ones(
    params: SamplingParams, expected: bool
) -> None:
    harness = Harness([params, PARAMS["filtered"]], processors={"odds": (OddsOnly(), False)})
    assert harness.sampler.needs_history([0]) is expected
    assert harness.sampler.needs_history([1, 0]) is expected
    assert not harness.sampler.needs_history([1])
    harness.take(0)
    assert not harness.sampler.needs_history([0])


def test_penalties_need_history_until_a_token_of_theirs_was_counted() -> None:
    for drafter, expected in ((no_drafts, False), (lambda _: [4, 4], True)):
        harness = Harness([PARAMS["repetition"], PARAMS["greedy"]], gpu=PretendGpu())
        assert harness.sampler.needs_history([0, 1])
        harness.step(drafter)
        assert harness.sampler.needs_history([1, 0]) is expected
        running = harness.take(0)
        assert not harness.sampler.needs_history([0, 1])
        harness.place(3, running)
        assert harness.sampler.needs_history([3])


def test_a_row_that_is_used_again_is_counted_anew() -> None:
    outputs = []
    for gpu in (None, PretendGpu()):
        harness = Harness([PARAMS["repetition"]] * 6, gpu=gpu)
        harness.run(4)
        for row in (4, 1, 5):
            prompt = [row, 8, 8]
            harness.take(row)
            request = NewRequest(f"n{row}", row, prompt, PARAMS["frequency"], 9, 0, 0, ())
            harness.place(row, Running(request, list(prompt)))
        outputs.append(harness.run(6))
    assert outputs[0] == outputs[1]


class Overlapped(Harness):
    """Starts each step before the one before it is finished, and knows no token that was drawn."""

    def overlapped(self, logits: Sequence[np.ndarray]) -> list[list[int]]:
        """Tokens of all requests, from logits given by step."""
        assert self.gpu
        pending: StartedSampling | None = None
        outputs: list[list[int]] = [[] for _ in self.running]
        for rows in [*logits, None]:
            started = None
            if rows is not None:
                assert not self.sampler.needs_history(list(self.running))
                step = step_of(self, self.gpu.put(torch.tensor(rows)), [()] * len(rows))
                with self.gpu:
                    started = self.sampler.start(step)
                self.token_ids[list(self.running), self.num_tokens[list(self.running)]] = -1
                self.num_tokens[list(self.running)] += 1
            if pending is not None:
                drawn = self.gpu.get(pending.token_ids).tolist()
                sampled = pending.finish()
                assert sampled.token_ids == [[token_id] for token_id in drawn]
                for output, new in zip(outputs, sampled.token_ids, strict=True):
                    output += new
            pending = started
        return outputs


def test_steps_that_overlap_draw_the_tokens_of_steps_that_do_not() -> None:
    kinds = ["greedy", "seeded", "filtered", "bias", "allowed", "min_tokens"]
    params = [PARAMS[name] for name in kinds]
    check_overlap(params)


def test_penalties_overlap_once_a_token_of_theirs_was_counted() -> None:
    kinds = ["repetition", "greedy", "presence", "frequency", "negative"]
    check_overlap([PARAMS[name] for name in kinds])
    check_overlap([PARAMS["repetition"], PARAMS["negative"]])


def check_overlap(params: Sequence[SamplingParams]) -> None:
    numbers = np.random.default_rng(0).normal(size=(8, len(params), VOCAB_SIZE))
    logits = list((numbers * 2).astype(np.float32))
    overlapped, plain = Overlapped(params, gpu=PretendGpu()), Harness(params)
    assert overlapped.step().token_ids == plain.step().token_ids
    assert not overlapped.sampler.needs_history(range(len(params)))
    found = overlapped.overlapped(logits)
    expected: list[list[int]] = [[] for _ in params]
    for rows in logits:
        step = step_of(plain, torch.tensor(rows), [()] * len(params))
        for row, new in enumerate(plain.sampler.sample(step).token_ids):
            expected[row] += new
            plain.token_ids[row, plain.num_tokens[row]] = new[0]
        plain.num_tokens[: len(params)] += 1
    assert found == expected


def test_a_started_step_is_about_the_requests_that_were_on_its_rows() -> None:
    harness = Harness(
        [SamplingParams(temperature=0, logprobs=2), PARAMS["allowed"]],
        grammars=[ListGrammar([[4]]), None],
        gpu=PretendGpu(),
    )
    assert harness.gpu
    logits = np.zeros((2, VOCAB_SIZE), np.float32)
    logits[1] = -np.inf
    step = step_of(harness, harness.gpu.put(torch.from_numpy(logits)), [()] * 2)
    grammar = harness.running[0].grammar
    assert isinstance(grammar, ListGrammar)
    matchers: dict[int, Any] = {0: grammar}
    with harness.gpu:
        started = harness.sampler.start(replace(step, grammars=matchers))
    matchers.clear()
    for row in (0, 1):
        harness.place(1 - row, harness.take(row))
    sampled = started.finish()
    assert sampled.token_ids == [[4], []]
    assert grammar.accepted == [4]
    assert [len(entry.top) for entry in sampled.logprobs[0]] == [2]
    assert sampled.error_fields == {1: "allowed_token_ids"}


class WrongSampler(Sampler):
    """Draws what isn't a token."""

    def candidates(self, inputs: SampleInput) -> Any:
        raise NotImplementedError("this sampler only draws")

    def draw(self, inputs: SampleInput, uniforms: Tensor) -> Tensor:
        return torch.full_like(inputs.top_k, VOCAB_SIZE + 7)


def test_a_token_outside_the_vocabulary_is_refused_before_the_next_step_can_fail_on_it() -> None:
    gpu = PretendGpu()
    with gpu:
        tokens = TokenSampler(
            sampler=WrongSampler(),
            max_num_seqs=8,
            vocab_size=VOCAB_SIZE,
            device=gpu.device,
            streams=PretendStreams(gpu),
        )
        tokens.add_row(0, NewRequest("r0", 0, [1], SamplingParams(), 1, 0, 0, ()))
        step = step_of(Harness([]), gpu.put(torch.zeros(1, VOCAB_SIZE)))
        started = tokens.start(step)
        with pytest.raises(PluginContractError, match="token ids from 28 to 28; allowed: 0 to 20"):
            started.finish()
    assert gpu.get(started.token_ids).tolist() == [VOCAB_SIZE - 1]


def test_a_step_in_which_nobody_samples_gives_nothing() -> None:
    gpu = PretendGpu()
    harness = Harness([], gpu=gpu)
    with gpu:
        started = harness.sampler.start(step_of(harness, gpu.put(torch.zeros(0, VOCAB_SIZE)), ()))
        assert len(started.token_ids) == 0
        assert started.finish().token_ids == []


def test_drafts_are_drawn_as_on_the_cpu() -> None:
    params = [SamplingParams(top_p=0.7), PARAMS["greedy"], SamplingParams(temperature=0.5)]
    logits = torch.from_numpy(np.stack([model([row]) for row in range(3)]))
    narrow, token_ids = logits[:2, :9], torch.tensor([3, 20, 0, 7, 8, 11, 12, 13, 5])
    drawn = {}
    for gpu in (None, PretendGpu()):
        harness = Harness(params, gpu=gpu)
        draws = harness.sampler.draft_draws([0, 1, 2], harness.num_tokens)
        assert draws
        put: Any = gpu.put if gpu else lambda tensor: tensor
        with gpu or nullcontext():
            found = [
                draws.draw(put(logits.clone()), [0, 1, 2], [0, 0, 0]),
                draws.draw(put(logits.clone()), [0, 1, 2], [1, 1, 1]),
                draws.draw(put(narrow.clone()), [1, 2], [2, 2], put(token_ids)),
                draws.draw(put(logits[:1].clone()), [1], [0]),
            ]
        drawn[gpu is None] = [tokens.as_subclass(Tensor).tolist() for tokens in found]
    assert drawn[True] == drawn[False]


def test_prompts_are_scored_without_waiting() -> None:
    gpu = PretendGpu()
    logits = torch.from_numpy(np.stack([model([row]) for row in range(4)]))
    with gpu:
        scores = score_prompt(gpu.put(logits), gpu.put(torch.tensor([1, 2, 3, 20])), 2)
        arriving = PretendStreams(gpu).copy_out(*scores.tensors)
        entries = scores.entries(arriving.wait())
    assert entries == prompt_logprobs(logits, [1, 2, 3, 20], 2)


@pytest.mark.parametrize("num_candidates", [5, 300])
def test_listed_candidates_are_drawn_the_same_on_a_gpu(num_candidates: int) -> None:
    gpu = PretendGpu()
    numbers = np.random.default_rng(0)
    ids = np.stack([numbers.permutation(5000)[:num_candidates] for _ in range(200)])
    probs = numbers.random(ids.shape) * (numbers.random(ids.shape) < 0.4)
    probs[:, 0] += 0.1
    candidates = Candidates(torch.from_numpy(probs).float(), torch.from_numpy(ids))
    uniforms = torch.from_numpy(numbers.random(200))
    expected = gumbel_max(candidates, uniforms)
    there = Candidates(gpu.put(candidates.probs), gpu.put(torch.from_numpy(ids)))
    with gpu:
        drawn = gumbel_max(there, gpu.put(uniforms))
    assert gpu.get(drawn).tolist() == expected.tolist()


def test_a_standard_draw_is_the_same_whether_or_not_the_sampler_may_look() -> None:
    gpu = PretendGpu()
    numbers = np.random.default_rng(1)
    logits = torch.from_numpy(numbers.normal(size=(6, 3000)).astype(np.float32) * 3)
    rows = {
        "temperature": torch.tensor([0, 1, 1, 0.5, 2, 1.0]),
        "top_k": torch.tensor([0, 0, 40, 0, 900, 0]),
        "top_p": torch.tensor([1, 1, 0.9, 0.5, 0.99, 1.0]),
        "min_p": torch.tensor([0, 0, 0, 0.01, 0, 0.2]),
    }
    uniforms = torch.from_numpy(numbers.random(6))
    flags: Any = {"is_all_greedy": False, "is_any_filtered": True, "extra_args": [None] * 6}
    sampler = standard_sampler()
    expected = sampler.draw(SampleInput(logits=logits.clone(), **rows, **flags), uniforms)
    there = {name: gpu.put(values) for name, values in rows.items()}
    with gpu:
        inputs = SampleInput(logits=gpu.put(logits.clone()), **there, **flags)
        drawn = sampler.draw(inputs, gpu.put(uniforms))
    assert gpu.get(drawn).tolist() == expected.tolist()
