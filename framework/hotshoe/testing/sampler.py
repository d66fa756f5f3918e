"""The conformance suite of the sampler contract. Subclass it, name your component, and run it with
pytest.

    class TestMySampler(SamplerConformance):
        def component(self) -> Component:
            return my_package.hotshoe_component()

        def target(self, logits, chosen):
            return my_definition_in_numpy(logits, chosen)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotshoe.api import (
    Candidates,
    Component,
    NewRequest,
    SampleInput,
    Sampler,
    SamplerContext,
    SamplingParams,
    gumbel_max,
)
from hotshoe.testing.distributions import (
    Filter,
    assert_follows,
    draw_by_noise,
    filtered_probabilities,
)
from hotshoe.testing.no_syncs import PretendGpu
from hotshoe.worker.random import uniforms
from hotshoe.worker.sampling import SamplingStep, TokenSampler

NUM_DRAWS = 50_000
NOISE = 2e-5  # a lead as small as this may be rounding
FILTERS = {
    "plain": Filter(),
    "cold": Filter(temperature=0.5),
    "hot": Filter(temperature=1.7),
    "top_k": Filter(top_k=4),
    "top_p": Filter(top_p=0.8),
    "min_p": Filter(min_p=0.15),
    "all": Filter(temperature=1.3, top_k=8, top_p=0.9, min_p=0.05),
}
CHECKED = pytest.mark.parametrize("chosen", FILTERS.values(), ids=FILTERS.keys())
WIDTHS = pytest.mark.parametrize("vocab_size", [8, 300, 1500])


def sample_input(
    logits: Tensor, chosen: Sequence[Filter], extra_args: dict[str, Any] | None = None
) -> SampleInput:
    """The record that a sampler gets for some rows; its logits are a copy."""
    drawn = [row for row in chosen if row.temperature > 0]
    return SampleInput(
        logits=logits.clone(),
        temperature=torch.tensor([row.temperature for row in chosen], dtype=torch.float32),
        top_k=torch.tensor([row.top_k for row in chosen], dtype=torch.int64),
        top_p=torch.tensor([row.top_p for row in chosen], dtype=torch.float32),
        min_p=torch.tensor([row.min_p for row in chosen], dtype=torch.float32),
        is_all_greedy=not drawn,
        is_any_filtered=any(row.top_k or row.top_p < 1 or row.min_p for row in drawn),
        extra_args=[extra_args] * len(chosen),
    )


def random_batch(vocab_size: int, seed: int = 0) -> tuple[Tensor, list[Filter]]:
    """Rows of all kinds side by side: greedy and drawn, filtered and not, masked, with ties."""
    numbers = np.random.default_rng(seed)
    chosen = [Filter(temperature=0), *FILTERS.values(), Filter(top_k=200), Filter(top_p=0.999)] * 3
    logits = numbers.normal(size=(len(chosen), vocab_size)) * numbers.choice(
        [0.1, 1.0, 4.0], size=(len(chosen), 1)
    )
    logits[::2] = np.round(logits[::2] * 4) / 4
    logits[numbers.random(logits.shape) < 0.2] = -np.inf
    logits[:, 0] = np.where(np.isinf(logits).all(-1), 0.0, logits[:, 0])
    return torch.from_numpy(logits.astype(np.float32)), chosen


class SamplerConformance:
    """What the core relies on. The target distribution is that of ``target``.

    Attributes:
        options: under ``sampler.options``.
        extra_args: ``SamplingParams.extra_args`` of every request.
        device: where to run.
    """

    options: ClassVar[dict[str, Any]] = {}
    extra_args: ClassVar[dict[str, Any] | None] = None
    device: ClassVar[str] = "cpu"

    def component(self) -> Component:
        """The component under test."""
        raise NotImplementedError("a conformance suite has to name its component")

    def target(self, logits: NDArray[np.float32], chosen: Filter) -> NDArray[np.float64]:
        """What the sampler promises: probabilities ``[V]`` in plain numpy. Override it if the
        sampler isn't temperature, top_k, top_p and min_p.
        """
        return filtered_probabilities(logits, chosen)

    def sampler(self, vocab_size: int, device: str | torch.device | None = None) -> Sampler:
        """A fresh sampler, on another device than that of the suite if one is given."""
        component = self.component()
        context = SamplerContext(device=torch.device(device or self.device), vocab_size=vocab_size)
        return cast(Sampler, component.factory(component.options(**self.options), context))

    def _input(self, logits: Tensor, chosen: Sequence[Filter]) -> SampleInput:
        inputs = sample_input(logits, chosen, self.extra_args)
        return inputs if self.device == "cpu" else _moved(inputs, self._here)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _uniforms(self, seed: int, num_rows: int) -> Tensor:
        return self._here(torch.from_numpy(np.random.default_rng(seed).random(num_rows)))

    def _candidates(self, logits: Tensor, chosen: Sequence[Filter]) -> Candidates:
        """Those of the sampler, on the CPU."""
        found = self.sampler(logits.shape[1]).candidates(self._input(logits, chosen))
        token_ids = None if found.token_ids is None else found.token_ids.cpu()
        return Candidates(found.probs.cpu(), token_ids)

    def test_component_states_the_contract_it_was_written_for(self) -> None:
        assert self.component().contract == "sampler/0"

    @WIDTHS
    def test_probabilities_are_not_negative_and_sum_to_one(self, vocab_size: int) -> None:
        probs = self._candidates(*random_batch(vocab_size)).probs
        assert probs.dtype == torch.float32
        assert (probs >= 0).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(len(probs)), atol=1e-5, rtol=0)

    @WIDTHS
    def test_masked_tokens_have_no_probability(self, vocab_size: int) -> None:
        logits, chosen = random_batch(vocab_size)
        dense = _dense(self._candidates(logits, chosen), vocab_size)
        assert (dense[logits == -torch.inf] == 0).all()

    @WIDTHS
    def test_no_candidate_is_listed_twice(self, vocab_size: int) -> None:
        candidates = self._candidates(*random_batch(vocab_size))
        if candidates.token_ids is None:
            assert candidates.probs.shape[1] == vocab_size
            return
        for probs, token_ids in zip(candidates.probs, candidates.token_ids, strict=True):
            listed = token_ids[probs > 0].tolist()
            assert len(listed) == len(set(listed))

    @WIDTHS
    def test_candidates_are_those_of_the_target(self, vocab_size: int) -> None:
        logits, chosen = random_batch(vocab_size)
        dense = _dense(self._candidates(logits, chosen), vocab_size)
        for row, row_logits, row_chosen in zip(dense, logits, chosen, strict=True):
            expected = self.target(row_logits.numpy(), row_chosen)
            np.testing.assert_allclose(row.numpy(), expected, atol=1e-5)

    @WIDTHS
    def test_draw_returns_what_gumbel_max_of_the_candidates_returns(self, vocab_size: int) -> None:
        for seed in range(20):
            logits, chosen = random_batch(vocab_size, seed)
            numbers = self._uniforms(seed, len(chosen))
            drawn = self.sampler(vocab_size).draw(self._input(logits, chosen), numbers)
            candidates = self._candidates(logits, chosen)
            expected = gumbel_max(candidates, numbers.cpu())
            dense = _dense(candidates, vocab_size).double().numpy()
            for row in range(len(chosen)):
                found = draw_by_noise(dense[row], float(numbers[row]))
                if found.margin > NOISE:
                    assert drawn[row] == expected[row] == found.token_id

    @WIDTHS
    def test_a_row_does_not_depend_on_the_rows_beside_it(self, vocab_size: int) -> None:
        logits, chosen = random_batch(vocab_size)
        numbers = self._uniforms(1, len(chosen))
        together = _dense(self._candidates(logits, chosen), vocab_size)
        drawn = self.sampler(vocab_size).draw(self._input(logits, chosen), numbers)
        for row in range(len(chosen)):
            one, its = logits[row : row + 1], chosen[row : row + 1]
            alone = _dense(self._candidates(one, its), vocab_size)
            torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=0)
            again = self.sampler(vocab_size).draw(self._input(one, its), numbers[row : row + 1])
            assert again[0] == drawn[row]

    @WIDTHS
    def test_declared_types_of_logits_draw_what_float32_draws(self, vocab_size: int) -> None:
        sampler = self.sampler(vocab_size)
        numbers = self._uniforms(2, len(random_batch(8)[1]))
        for name in sampler.capabilities.logits_dtypes:
            logits, chosen = random_batch(vocab_size)
            logits = logits.to(getattr(torch, name))
            drawn = sampler.draw(self._input(logits, chosen), numbers)
            again = sampler.draw(self._input(logits.float(), chosen), numbers)
            assert drawn.tolist() == again.tolist()

    @WIDTHS
    def test_most_likely_is_the_first_of_the_largest_logits(self, vocab_size: int) -> None:
        sampler = self.sampler(vocab_size)
        for name in sampler.capabilities.logits_dtypes:
            logits = random_batch(vocab_size)[0].to(getattr(torch, name))
            logits[3] = -torch.inf
            logits[4, -1] = torch.inf
            token_ids, best = sampler.most_likely(self._here(logits))
            assert (token_ids.dtype, best.dtype) == (torch.int64, torch.float32)
            assert token_ids.tolist() == logits.float().numpy().argmax(-1).tolist()
            assert best.tolist() == logits.float().amax(-1).tolist()

    def test_most_likely_of_a_row_with_nan_is_nan(self) -> None:
        logits = torch.zeros(2, 1500)
        logits[1, 700] = torch.nan
        token_ids, best = self.sampler(1500).most_likely(self._here(logits))
        assert token_ids.tolist() == [0, 700]
        assert best.isnan().tolist() == [False, True]

    def test_a_gpu_is_not_waited_for(self) -> None:
        if {"cpu", "cuda"} - {*self.sampler(8).capabilities.devices}:
            pytest.skip("only what runs on a CPU, too, can be tried on a pretended GPU")
        gpu = PretendGpu()
        logits, chosen = random_batch(1500)
        numbers = torch.from_numpy(np.random.default_rng(1).random(len(chosen)))
        inputs = sample_input(logits, chosen, self.extra_args)
        there = _moved(sample_input(logits, chosen, self.extra_args), gpu.put)
        with gpu:
            sampler = self.sampler(1500, gpu.device)
            token_ids, best = sampler.most_likely(there.logits)
            sampler.mask(there.logits, gpu.put(torch.full((len(chosen), 47), -1)).int())
            drawn = sampler.draw(there, gpu.put(numbers))
        on_cpu = self.sampler(1500, "cpu")
        expected_ids, expected_best = on_cpu.most_likely(logits)
        assert gpu.get(token_ids).tolist() == expected_ids.tolist()
        assert gpu.get(best).tolist() == expected_best.tolist()
        assert gpu.get(drawn).tolist() == on_cpu.draw(inputs, numbers).tolist()

    @pytest.mark.parametrize("vocab_size", [8, 33, 300, 1500])
    def test_a_mask_forbids_the_tokens_whose_bits_are_0_and_nothing_else(
        self, vocab_size: int
    ) -> None:
        sampler, numbers = self.sampler(vocab_size), np.random.default_rng(4)
        for name in sampler.capabilities.logits_dtypes:
            logits = random_batch(vocab_size)[0].to(getattr(torch, name))
            is_allowed = numbers.random((len(logits), -(-vocab_size // 32) * 32)) < 0.5
            is_allowed[1], is_allowed[2] = True, False
            bits = torch.from_numpy(np.packbits(is_allowed, axis=1, bitorder="little"))
            expected = logits.clone()
            expected[torch.from_numpy(~is_allowed[:, :vocab_size])] = -torch.inf
            here = self._here(logits)
            sampler.mask(here, self._here(bits.view(torch.int32)))
            assert torch.equal(here.cpu(), expected)

    def test_sampler_uses_no_randomness_of_its_own(self) -> None:
        logits, chosen = random_batch(300)
        numbers = self._uniforms(1, len(chosen))
        sampler = self.sampler(300)
        torch.manual_seed(1)
        state = torch.get_rng_state()
        first = sampler.draw(self._input(logits, chosen), numbers)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        assert torch.equal(sampler.draw(self._input(logits, chosen), numbers), first)

    @CHECKED
    def test_draws_follow_the_target(self, chosen: Filter) -> None:
        logits = _tiny_logits()
        positions = np.arange(NUM_DRAWS)
        numbers = uniforms(np.full(NUM_DRAWS, 11, np.uint64), np.zeros_like(positions), positions)
        drawn: list[int] = []
        for part in np.split(numbers, 10):
            rows = torch.from_numpy(np.tile(logits, (len(part), 1)))
            inputs = self._input(rows, [chosen] * len(part))
            numbers_here = self._here(torch.from_numpy(part))
            drawn += self.sampler(len(logits)).draw(inputs, numbers_here).tolist()
        assert_follows(drawn, self.target(logits, chosen))

    @CHECKED
    def test_tokens_follow_the_target_with_drafts(self, chosen: Filter) -> None:
        logits = _tiny_logits()
        drawn = draw_with_drafts(
            self.sampler(len(logits)), logits, chosen, self.extra_args, device=self.device
        )
        assert_follows(drawn, self.target(logits, chosen))


def draw_with_drafts(
    sampler: Sampler,
    logits: NDArray[np.float32],
    chosen: Filter,
    extra_args: dict[str, Any] | None = None,
    *,
    device: str = "cpu",
) -> list[int]:
    """At least ``NUM_DRAWS`` tokens of requests whose drafts are good, bad and mixed.

    Args:
        sampler: under test.
        logits: ``[V]``, the same at every position.
        chosen: parameters of all requests.
        extra_args: of all requests.
        device: of the sampler.
    """
    num_reqs, num_drafts, vocab_size = 256, 3, len(logits)
    tokens = TokenSampler(
        sampler=sampler,
        max_num_seqs=num_reqs,
        vocab_size=vocab_size,
        device=torch.device(device),
    )
    params = SamplingParams(
        temperature=chosen.temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        min_p=chosen.min_p,
        extra_args=extra_args,
    )
    for row in range(num_reqs):
        tokens.add_row(row, NewRequest(str(row), row, [0], params, row, 0, 0, ()))
    numbers = np.random.default_rng(3)
    likely = np.argsort(-logits)[:3]
    num_tokens = np.ones(num_reqs, dtype=np.int64)
    drawn: list[int] = []
    while len(drawn) < NUM_DRAWS:
        drafts = numbers.choice(likely, size=(num_reqs, num_drafts)).tolist()
        step = SamplingStep(
            rows=range(num_reqs),
            request_ids=[str(row) for row in range(num_reqs)],
            draft_token_ids=drafts,
            logits=torch.tensor(logits, device=device).repeat(num_reqs * (num_drafts + 1), 1),
            token_ids=np.zeros((num_reqs, 1), dtype=np.int32),
            num_tokens=num_tokens,
            num_prompt_tokens=np.ones(num_reqs, dtype=np.int64),
        )
        for row, new in enumerate(tokens.sample(step).token_ids):
            num_tokens[row] += len(new)
            drawn += new
    return drawn


def _moved(inputs: SampleInput, move: Callable[[Tensor], Tensor]) -> SampleInput:
    return replace(
        inputs,
        logits=move(inputs.logits),
        temperature=move(inputs.temperature),
        top_k=move(inputs.top_k),
        top_p=move(inputs.top_p),
        min_p=move(inputs.min_p),
    )


def _tiny_logits() -> NDArray[np.float32]:
    logits = np.random.default_rng(5).normal(size=14).astype(np.float32) * 1.5
    logits[3] = -np.inf
    return logits


def _dense(candidates: Candidates, vocab_size: int) -> Tensor:
    """``[R, V]`` probabilities."""
    if candidates.token_ids is None:
        return candidates.probs
    dense = torch.zeros(len(candidates.probs), vocab_size)
    return dense.scatter_add_(1, candidates.token_ids, candidates.probs)
