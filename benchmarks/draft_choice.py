"""How often a draft is kept, by how it is chosen from the drafter's distribution.

Text is sampled from the model. At every position of it the distribution p of the next token is
compared with that of drafters of several strengths, q: the same model that sees the last few tokens
only, and the same model with quantized weights. The ways to choose:

- likely: the most likely token, kept if it is the one that the target draws: p(argmax q);
- rejection: drawn from q, kept with probability min(1, p / q), else replaced (Leviathan et al.
  2022, arXiv:2211.17192): sum of min(p, q). A seed means other tokens with drafts than without;
- inverse CDF: both draw with one uniform, in the order of token ids;
- near: the token with most of q within 0.1 of that uniform;
- noise: both draw with the same Gumbel noise, one share for each token (arXiv:2408.07978);
- two levels: the same among blocks of token ids first, then within one. This is ``gumbel_max``,
  what the engine does.

With --ngram, --eagle or --medusa, the engine also runs these drafters with each rule of acceptance,
and, but for n-grams, once more with the most likely tokens for drafts. JSON goes into --output,
tables to standard output.

    python benchmarks/draft_choice.py [--ngram] [--eagle FOLDER] [--medusa FOLDER] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from drafts import QUESTIONS, Counts, prompts_of, read_questions
from hotshoe import LLM, SamplingParams
from hotshoe.api import (
    Candidates,
    DraftTokens,
    ProposeInput,
    Proposer,
    Requirements,
    StepRecord,
    gumbel_max,
)
from hotshoe.bench.machine import describe_machine, describe_versions
from hotshoe.testing.plugins import make_distribution
from hotshoe.weights.checkpoint import open_checkpoint

TEMPERATURES = (0.7, 1.0)
CONTEXTS = (4, 8, 16, 32)
NUM_UNIFORMS = 16
DISTANCE = 0.1
PIECE = 32  # positions at once
DRAWN, LIKELY = "drawn", "likely"
WAYS = (  # label, drafts, rule of acceptance
    ("drafter_invariant, likely drafts", LIKELY, "drafter_invariant"),
    ("drafter_invariant", DRAWN, "drafter_invariant"),
    ("leviathan", DRAWN, "leviathan"),
    ("typical", DRAWN, "typical"),  # for which drafters name the most likely tokens
)

LIKELY_DRAFTS = """
    from dataclasses import replace

    from hotshoe.api import Component, DraftDraws, Proposer, hookimpl
    from hotshoe_spec_decode import {name}

    FIRST, SECOND = [], []  # whether the most likely token was right, and the one after it

    class MostLikely(DraftDraws):
        def __init__(self, inputs, waiting):
            self._inputs, self._waiting = inputs, waiting

        def draw(self, logits, requests, num_drafts_before, token_ids=None):
            two = logits.topk(2).indices
            ids = two if token_ids is None else token_ids[two]
            for request, place, pair in zip(requests, num_drafts_before, ids.tolist()):
                if place == 0:
                    position = len(self._inputs.token_ids[request])
                    self._waiting[self._inputs.request_ids[request]] = (position, *pair)
            return ids[:, 0]

    class Likely(Proposer):
        def __init__(self, inner):
            self._inner, self._waiting = inner, {{}}
            self.max_draft_tokens, self.requirements = inner.max_draft_tokens, inner.requirements
            self.load_weights, self.forget = inner.load_weights, inner.forget

        def propose(self, inputs):
            for request_id, token_ids in zip(inputs.request_ids, inputs.token_ids):
                place, first, second = self._waiting.pop(request_id, (len(token_ids), 0, 0))
                if place < len(token_ids):
                    FIRST.append(token_ids[place] == first)
                    SECOND.append(token_ids[place] == second)
            return self._inner.propose(replace(inputs, draws=MostLikely(inputs, self._waiting)))

    @hookimpl
    def hotshoe_component():
        component = {name}.hotshoe_component()
        return replace(component, factory=lambda *parts: Likely(component.factory(*parts)))
"""


class StateRecorder(Proposer):
    """Drafts nothing, and keeps what the final norm gives for every token."""

    max_draft_tokens = 1
    requirements = Requirements(hidden_state_layers=(-1,))

    def __init__(self) -> None:
        self.pieces: dict[str, list[Tensor]] = {}

    def propose(self, inputs: ProposeInput) -> DraftTokens:
        bounds = inputs.query_start_loc
        for index, request_id in enumerate(inputs.request_ids):
            states = inputs.hidden_states[-1][bounds[index] : bounds[index + 1]]
            self.pieces.setdefault(request_id, []).append(states.float().clone())
        return DraftTokens(token_ids=[[] for _ in inputs.request_ids])


def states_of(
    llm: LLM, recorder: StateRecorder, sequences: Sequence[list[int]], last: Sequence[int]
) -> Tensor:
    """Hidden states of the last tokens of each sequence, so many of each."""
    recorder.pieces.clear()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate(list(sequences), params)
    # by number: those that start in the same step come in any order
    in_order = sorted(recorder.pieces, key=_number)
    found = [torch.cat(recorder.pieces[request_id]) for request_id in in_order]
    return torch.cat([states[-count:] for states, count in zip(found, last, strict=True)])


def _number(request_id: str) -> int:
    return int(re.findall(r"\d+", request_id.split("/")[0])[-1])


def collect(arguments: argparse.Namespace) -> dict[float, dict[str, Tensor]]:
    """By temperature, hidden states of the target and of each drafter, ``[N, hidden_size]``."""
    settings: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 1024}
    found: dict[float, dict[str, Tensor]] = {}
    texts: dict[float, list[tuple[list[int], int]]] = {}
    recorder = StateRecorder()
    with LLM(**settings, spec_decode=recorder) as llm:
        questions = read_questions(arguments.questions, arguments.per_category)
        by_category = prompts_of(llm, questions, arguments.max_tokens, 600)
        prompts = [prompt for several in by_category.values() for prompt in several]
        for temperature in TEMPERATURES:
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=arguments.max_tokens,
                    seed=seed,
                    detokenize=False,
                )
                for seed in range(len(prompts))
            ]
            outputs = llm.generate(prompts, params)
            sampled = [list(output.outputs[0].token_ids) for output in outputs]
            pairs = [
                ([*prompt, *token_ids[:-1]], len(token_ids))
                for prompt, token_ids in zip(prompts, sampled, strict=True)
            ]
            texts[temperature] = pairs
            found[temperature] = {"target": states_of(llm, recorder, *zip(*pairs, strict=True))}
            for context in CONTEXTS:
                ends = [
                    tokens[max(end - context, 0) : end]
                    for tokens, count in pairs
                    for end in range(len(tokens) - count + 1, len(tokens) + 1)
                ]
                name = f"last {context} tokens"
                found[temperature][name] = states_of(llm, recorder, ends, [1] * len(ends))
            print(f"collected at temperature {temperature}", file=sys.stderr, flush=True)
    recorder = StateRecorder()
    with LLM(**settings, quantization="gguf", spec_decode=recorder) as llm:
        for temperature, pairs in texts.items():
            states = states_of(llm, recorder, *zip(*pairs, strict=True))
            found[temperature]["quantized"] = states
    return found


def read_head() -> Tensor:
    """The matrix from hidden states to logits, ``[vocab_size, hidden_size]`` float32."""
    with open_checkpoint("embedded") as checkpoint:
        tensors = {tensor.name: tensor for tensor in checkpoint.tensors()}
        name = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
        return tensors[name].to_dense(torch.float32)


def shares_kept(
    target: Tensor, drafter: Tensor, head: Tensor, temperature: float
) -> dict[str, Any]:
    """The share of drafts that is kept, by way."""
    sums: dict[str, float] = {}
    for start in range(0, len(target), PIECE):
        p, q = (
            (states[start : start + PIECE] @ head.t() / temperature).double().softmax(-1)
            for states in (target, drafter)
        )
        for way, shares in piece_kept(p, q):
            sums[way] = sums.get(way, 0.0) + float(shares.sum())
    return {way: round(total / len(target), 3) for way, total in sums.items()}


def piece_kept(p: Tensor, q: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Per position the probability that the draft is kept, by way."""
    p_ends, q_ends = p.cumsum(-1), q.cumsum(-1)
    yield "likely", p.gather(1, q.argmax(-1, keepdim=True))[:, 0]
    yield "rejection", torch.minimum(p, q).sum(-1)
    overlap = torch.minimum(p_ends, q_ends) - torch.maximum(p_ends - p, q_ends - q)
    yield "inverse CDF", overlap.clamp(min=0).sum(-1)
    near, two_levels = torch.zeros(len(p)), torch.zeros(len(p))
    ids = q.topk(256).indices.sort(-1).values
    ends = q_ends.gather(1, ids)
    begins = ends - q.gather(1, ids)
    generator = torch.Generator().manual_seed(0)
    for number in range(NUM_UNIFORMS):
        place = (number + 0.5) / NUM_UNIFORMS
        target = torch.full((len(p), 1), place, dtype=torch.float64)
        drawn = torch.searchsorted(p_ends, target * p_ends[:, -1:], right=True)
        within = ends.clamp(max=place + DISTANCE) - begins.clamp(min=place - DISTANCE)
        near += (ids.gather(1, within.argmax(-1, keepdim=True)) == drawn)[:, 0]
        uniforms = torch.rand(len(p), dtype=torch.float64, generator=generator)
        p_drawn, q_drawn = (gumbel_max(Candidates(one.float()), uniforms) for one in (p, q))
        two_levels += p_drawn == q_drawn
    yield "near", near / NUM_UNIFORMS
    # both take token i with probability 1 / sum over j of max(p_j / p_i, q_j / q_i)
    order = (p / q.clamp(min=1e-300)).argsort(-1)
    p_sorted, q_sorted = p.gather(1, order), q.gather(1, order)
    above = p_sorted.flip(-1).cumsum(-1).flip(-1) - p_sorted
    both = 1 / (above / p_sorted + q_sorted.cumsum(-1) / q_sorted)
    yield "noise", both.nan_to_num(0).sum(-1)
    yield "two levels", two_levels / NUM_UNIFORMS


@dataclass(slots=True)
class StepCounts(Counts):
    """With the time that it takes to draw and verify."""

    sample_s: float = 0.0
    num_steps_of_engine: int = 0

    def add(self, step: StepRecord) -> None:
        """Count a step."""
        Counts.add(self, step)
        if not step.num_prefill_tokens:
            self.sample_s += step.timings_s.get("sample", 0.0)
            self.num_steps_of_engine += 1

    def figures(self) -> dict[str, Any]:
        """Those of drafts, and the time of a step of the engine."""
        sample_ms = 1e3 * self.sample_s / max(self.num_steps_of_engine, 1)
        return {**Counts.figures(self), "sample_ms_per_engine_step": round(sample_ms, 3)}


def run_drafter(name: str, path: str | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of a drafter in the engine, by way and temperature: what became of its drafts."""
    if path is None:
        return {
            way: _in_engine(name, {}, rule, arguments)
            for way, drafts, rule in WAYS
            if drafts == DRAWN
        }
    likely = f"likely_{name}"
    with tempfile.TemporaryDirectory() as folder:
        site = make_distribution(
            Path(folder),
            modules={f"{likely}_drafts": LIKELY_DRAFTS.format(name=name)},
            entry_points={"hotshoe.spec_decode": {likely: f"{likely}_drafts"}},
        )
        sys.path.insert(0, str(site))
        try:
            plugins = {DRAWN: name, LIKELY: likely}
            return {
                way: _in_engine(plugins[drafts], {"model": path}, rule, arguments)
                for way, drafts, rule in WAYS
            }
        finally:
            sys.path.remove(str(site))


def _in_engine(
    plugin: str, options: Mapping[str, Any], rule: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    print(f"running {plugin} with {rule}", file=sys.stderr, flush=True)
    spec_decode = {"name": plugin, "options": options, "adaptive": False, "acceptance": rule}
    found = {}
    with LLM(spec_decode=spec_decode, max_model_len=1024) as llm:
        questions = read_questions(arguments.questions, arguments.per_category)
        by_category = prompts_of(llm, questions, arguments.max_tokens, 600)
        prompts = [prompt for several in by_category.values() for prompt in several]
        module = sys.modules.get(f"{plugin}_drafts")
        for temperature in (0.0, *TEMPERATURES):
            counts = StepCounts()
            llm.engine.step_observers.append(counts.add)
            if module is not None:
                module.FIRST.clear()
                module.SECOND.clear()
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=2 * arguments.max_tokens,
                    seed=seed,
                    detokenize=False,
                    logprobs=0,
                )
                for seed in range(len(prompts))
            ]
            outputs = [one.outputs[0] for one in llm.generate(prompts, params)]
            llm.engine.step_observers.remove(counts.add)
            figures = counts.figures()
            num_tokens = sum(len(one.token_ids) for one in outputs)
            total = sum(one.cumulative_logprob or 0.0 for one in outputs)
            figures["mean_logprob"] = round(total / num_tokens, 3)
            if module is not None:
                figures["first_right"] = round(fmean(module.FIRST), 3)
                figures["second_right"] = round(fmean(module.SECOND), 3)
            found[str(temperature)] = figures
    return found


def tables(result: Mapping[str, Any]) -> Iterator[str]:
    """Markdown."""
    for temperature, drafters in result["shares_kept"].items():
        ways = list(next(iter(drafters.values())))
        yield f"| temperature {temperature} | " + " | ".join(ways) + " |"
        yield "|---" * (len(ways) + 1) + "|"
        for name, shares in drafters.items():
            yield f"| {name} | " + " | ".join(f"{shares[way]:.2f}" for way in ways) + " |"
        yield ""
    columns = list(map(str, (0.0, *TEMPERATURES)))
    yield "| tokens a step | " + " | ".join(f"temperature {one}" for one in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, ways in result["engine"].items():
        for way, found in ways.items():
            cells = (f"{found[one]['tokens_per_step']:.2f}" for one in columns)
            yield f"| {name}, {way} | " + " | ".join(cells) + " |"
    yield ""
    for name, ways in result["engine"].items():
        for temperature in columns:
            for way, found in ways.items():
                figures = found[temperature]
                places = " ".join(f"{one:.2f}" for one in figures["acceptance_per_position"])
                second = figures.get("second_right")
                yield (
                    f"{name}, temperature {temperature}, {way}: {places}, sampling "
                    f"{figures['sample_ms_per_engine_step']:.1f} ms, mean log probability "
                    f"{figures['mean_logprob']:.2f}"
                    + ("" if second is None else f"; the second most likely is right {second:.2f}")
                )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ngram", action="store_true")
    for name in ("eagle", "medusa", "draft-model"):
        parser.add_argument(f"--{name}", metavar="PATH")
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--per-category", type=int, default=3, help="questions")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--skip-distributions", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    shares: dict[str, Any] = {}
    if not arguments.skip_distributions:
        head = read_head()
        for temperature, states in collect(arguments).items():
            target = states.pop("target")
            shares[str(temperature)] = {
                name: shares_kept(target, one, head, temperature) for name, one in states.items()
            }
    paths = {name: getattr(arguments, name) for name in ("eagle", "medusa", "draft_model")}
    drafters = {"ngram": None} if arguments.ngram else {}
    drafters |= {name: path for name, path in paths.items() if path}
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "shares_kept": shares,
        "engine": {name: run_drafter(name, path, arguments) for name, path in drafters.items()},
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(tables(result)))


if __name__ == "__main__":
    main()
