"""Steps that are recorded, and those that can't be: the same tokens, and one line that says why."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hotshoe import LLM, SamplingParams
from hotshoe.api import (
    DraftTokens,
    Kernels,
    KernelsContext,
    ProposeInput,
    Proposer,
    Recording,
    Requirements,
    StepRecord,
    Weight,
)
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from hotshoe_kernels.cpu import hotshoe_component

PROMPTS = [[1, 2, 3], [4, 5] * 10]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class Spoilt(Kernels):
    """Somebody else's kernels around the native ones: one op does more."""

    def __init__(self, spoil: Callable[[Tensor], Tensor]) -> None:
        component = hotshoe_component()
        context = KernelsContext(device=torch.device("cpu"), dtype=torch.float32)
        inner = component.factory(component.options(), context)
        assert isinstance(inner, Kernels)
        self._inner = inner
        self._spoil = spoil
        self.capabilities = inner.capabilities
        self.num_calls = 0
        self.num_recordings = 0

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return self._inner.linear(x, weight)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._inner.rms_norm(x, weight, eps, residual)

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._inner.rope(q, k, positions, cos, sin)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self._spoil(self._inner.silu_and_mul(x))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._inner.add(x, y)

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        return self._inner.embedding(token_ids, weight)

    def prepare_weight(self, weight: Weight) -> Weight:
        return self._inner.prepare_weight(weight)

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._inner.take_rows(x, rows)

    def record(self, run: Callable[[], tuple[Tensor, ...]], sizes: Sequence[int] = ()) -> Recording:
        self.num_recordings += 1
        return self._inner.record(run, sizes)


class DraftsAnyNumber(Proposer):
    """Makes steps of ever other shapes."""

    max_draft_tokens = 15

    def __init__(self) -> None:
        self._random = random.Random(0)

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        left = self._random.randint(0, sum(inputs.max_draft_tokens))
        counts = []
        for most in inputs.max_draft_tokens:
            counts.append(min(left, most))
            left -= counts[-1]
        return DraftTokens(token_ids=[[7] * count for count in counts])


class DraftsNothing(Proposer):
    """Keeps the hidden states of every step, as a drafter for which drafts don't pay does."""

    max_draft_tokens = 4
    requirements = Requirements(hidden_state_layers=(0, -1))

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        self.kept += [(state, state.clone()) for state in inputs.hidden_states.values()]
        return DraftTokens(token_ids=[[] for _ in inputs.request_ids])


def through_python(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist())


def generate(
    path: Path, kernels: Kernels | str, attention: str, drafter: Proposer | None = None
) -> list[tuple[int, ...]]:
    """With kernels and attention that record together, unless ``kernels`` spoils it."""
    with LLM(
        str(path),
        dtype="float32",
        max_model_len=64,
        kernels=kernels,
        attention=attention,
        quantization="none",
        spec_decode=drafter,
    ) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("spoil", "name"),
    [(lambda x: x + 0, "add"), (through_python, "resolve_conj"), (lambda x: x.clone(), "clone")],
)
def test_what_cannot_be_recorded_runs_op_by_op_and_says_so_once(
    tiny_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Tensor], Tensor],
    name: str,
) -> None:
    expected = generate(tiny_path, "cpu", "cpu")
    kernels = Spoilt(spoil)
    with caplog.at_level(logging.INFO, "hotshoe.worker.recordings"):
        assert generate(tiny_path, kernels, "cpu") == expected
    said = [record.getMessage() for record in caplog.records if "op by op" in record.message]
    assert len(said) == 1
    assert f"torch's {name}," in said[0]
    assert kernels.num_calls > 2 * GREEDY.max_tokens


def test_what_can_be_recorded_is_not_called_any_more(tiny_path: Path) -> None:
    expected = generate(tiny_path, "cpu", "cpu")
    kernels = Spoilt(lambda x: x)
    assert generate(tiny_path, kernels, "cpu") == expected
    assert kernels.num_calls < 2 * GREEDY.max_tokens


def test_steps_of_a_drafter_that_drafts_nothing_are_recorded_with_its_hidden_states(
    tiny_path: Path,
) -> None:
    expected = generate(tiny_path, "cpu", "cpu")
    kernels, drafter = Spoilt(lambda x: x), DraftsNothing()
    assert generate(tiny_path, kernels, "cpu", drafter) == expected
    assert kernels.num_calls < 2 * GREEDY.max_tokens
    assert len(drafter.kept) == 2 * GREEDY.max_tokens
    assert all(torch.equal(state, copy) for state, copy in drafter.kept)


def test_attention_that_does_not_record_goes_with_native_kernels(tiny_path: Path) -> None:
    assert generate(tiny_path, "cpu", "torch_sdpa") == generate(tiny_path, "torch", "torch_sdpa")


def test_two_recordings_serve_steps_of_ever_other_sizes(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSHOE_SPEC_DECODE__ADAPTIVE", "false")
    kernels = Spoilt(lambda x: x)
    num_steps = 0

    def count_step(record: StepRecord) -> None:
        nonlocal num_steps
        num_steps += 1

    with LLM(
        str(tiny_path),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=8,
        kernels=kernels,
        attention="cpu",
        quantization="none",
        spec_decode=DraftsAnyNumber(),
    ) as llm:
        llm.on_step(count_step)
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        for num_reqs in (8, 5, 3):
            llm.generate([[index, 1, 2] for index in range(num_reqs)], params)
    assert num_steps > 50
    assert kernels.num_recordings == 2
    assert kernels.num_calls == 2 * 2  # layers


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"]
)
@pytest.mark.parametrize("drafter", [None, "drafts", "states"])
def test_recorded_steps_of_all_kinds_give_what_the_ops_give(
    tmp_path: Path, architecture: str, drafter: str | None, quantization: str
) -> None:
    model_type = architecture.removesuffix("ForCausalLM").lower()
    window = {"sliding_window": 20} if model_type == "mistral" else {}
    config = tiny_llama_config(model_type=model_type, **window)
    path = write_tiny_checkpoint(tmp_path / "model", config, architecture=architecture)
    numbers = random.Random(1)
    prompts = [[numbers.randrange(256) for _ in range(length)] for length in (1, 70, 3, 16, 39, 2)]
    prompts += [[*prompts[1][:48], 7], prompts[4]]  # with prefixes that are cached by then
    makers = {None: lambda: None, "drafts": DraftsAnyNumber, "states": DraftsNothing}
    results = []
    for is_recorded in (True, False):
        with LLM(
            str(path),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            kernels={"name": "cpu", "record": is_recorded},
            attention="cpu",
            quantization=quantization,
            scheduler={"max_num_batched_tokens": 33},
            spec_decode=makers[drafter](),
        ) as llm:
            params = [
                SamplingParams(
                    max_tokens=9 + index,
                    temperature=0.0,
                    ignore_eos=True,
                    logprobs=2,
                    prompt_logprobs=1 if index == 3 else None,
                )
                for index in range(len(prompts))
            ]
            outputs = llm.generate(prompts, params)
        results.append(
            [
                (one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs)
                for one in outputs
            ]
        )
    assert results[0] == results[1]
