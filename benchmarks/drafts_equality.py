"""Greedy output with drafts against that without, token by token.

Every question is answered by an engine without drafts and by one with each drafter, in float32, in
all the ways in which drafts could show: batches of 1, 8 and 32, stop strings, stop tokens held off
by min_tokens, limits, log probabilities, constraints, and a KV cache so small that requests are
preempted. Where two outputs part, the difference is excused if the logits of the two tokens are
within 1e-4 of each other, and the comparison of that output ends; any other one is an error. Drafts
are made whether they pay or not.

    python benchmarks/drafts_equality.py --ngram --eagle FOLDER --questions FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafts import QUESTIONS, chosen_engines, prompts_of, read_questions
from hotshoe import LLM, CompletionOutput, SamplingParams
from hotshoe.api import StructuredOutputs

MARGIN = 1e-4
LARGE = 32
BLOCK_SIZE = 16
CONSTRAINTS = (
    StructuredOutputs(regex=r"[A-Z][a-z]{2,9}( [a-z]{1,9}){3,12}\."),
    StructuredOutputs(
        json={
            "type": "object",
            "properties": {
                "title": {"type": "string", "maxLength": 30},
                "year": {"type": "integer"},
                "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "minItems": 2},
            },
            "required": ["title", "year", "tags"],
            "additionalProperties": False,
        }
    ),
)

MakeParams = Callable[[int, SamplingParams, CompletionOutput], SamplingParams]


def changed(params: SamplingParams, **changes: Any) -> SamplingParams:
    """The same but for some fields."""
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**fields | changes)


def stopped(index: int, params: SamplingParams, seen: CompletionOutput) -> SamplingParams:
    """Stop at a few letters from the middle of the answer."""
    middle = len(seen.text) // 2
    return changed(params, stop=(seen.text[middle : middle + 3 + index % 4] or ".",))


def held_off(index: int, params: SamplingParams, seen: CompletionOutput) -> SamplingParams:
    """Stop at an early token of the answer, but not so early."""
    token_ids = list(seen.token_ids)
    return changed(params, stop_token_ids=(token_ids[index % 4 % len(token_ids)],), min_tokens=9)


def cut(index: int, params: SamplingParams, seen: CompletionOutput) -> SamplingParams:
    """End after a few tokens."""
    return changed(params, max_tokens=1 + index % 9)


def scored(index: int, params: SamplingParams, seen: CompletionOutput) -> SamplingParams:
    """Tell log probabilities."""
    return changed(params, logprobs=3)


def constrained(index: int, params: SamplingParams, seen: CompletionOutput) -> SamplingParams:
    """Follow a pattern or a schema."""
    return changed(params, structured_outputs=CONSTRAINTS[index % len(CONSTRAINTS)])


def plain(index: int, params: SamplingParams, seen: CompletionOutput) -> SamplingParams:
    """Nothing else."""
    return params


@dataclass(frozen=True, slots=True)
class Way:
    """How requests are run.

    Attributes:
        batch_size: requests that are given to the engine together.
        is_cache_small: whether they don't fit its KV cache.
        has_all: whether all questions are run, or a few of each category.
    """

    make_params: MakeParams = plain
    batch_size: int = LARGE
    is_cache_small: bool = False
    has_all: bool = False


WAYS = {
    "batch 32": Way(has_all=True),
    "batch 8": Way(batch_size=8),
    "batch 1": Way(batch_size=1),
    "stop strings": Way(stopped),
    "min_tokens": Way(held_off),
    "max_tokens": Way(cut),
    "logprobs": Way(scored),
    "constraints": Way(constrained),
    "preemption": Way(is_cache_small=True),
}


@dataclass(slots=True)
class Tally:
    """What one drafter did in one way."""

    num_outputs: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    excuses: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [
            f"{self.num_outputs} outputs",
            f"{self.num_tokens} tokens equal",
            f"{self.num_accepted} of them drafts",
            f"{len(self.excuses)} excused",
        ]
        if self.num_preemptions:
            parts.append(f"{self.num_preemptions} preemptions")
        return ", ".join([*parts, *([f"{len(self.errors)} WRONG"] if self.errors else [])])


class Comparison:
    """Compares outputs with those of an engine without drafts, which also settles excuses."""

    def __init__(self, reference: LLM) -> None:
        self._reference = reference

    def add(
        self,
        tally: Tally,
        prompt: Sequence[int],
        expected: CompletionOutput,
        actual: CompletionOutput,
    ) -> None:
        """Compare one output."""
        place = num_common(expected.token_ids, actual.token_ids)
        tally.num_outputs += 1
        tally.num_tokens += place
        if actual.metrics is not None:
            tally.num_accepted += actual.metrics.num_accepted_tokens
            tally.num_preemptions += actual.metrics.num_preemptions
        what = f"output {tally.num_outputs - 1} at token {place}"
        if place < min(len(expected.token_ids), len(actual.token_ids)):
            gap = self._gap(prompt, expected, actual, place)
            text = f"{what}: logits of the two tokens are {gap:.1e} apart"
            (tally.excuses if gap <= MARGIN else tally.errors).append(text)
        elif (expected.text, expected.finish_reason) != (actual.text, actual.finish_reason):
            tally.errors.append(
                f"{what}: ended as {actual.finish_reason!r} with {actual.text[-20:]!r}, expected "
                f"{expected.finish_reason!r} with {expected.text[-20:]!r}"
            )
        if expected.logprobs is not None and actual.logprobs is not None:
            for entry, other in zip(expected.logprobs[:place], actual.logprobs, strict=False):
                difference = abs(entry.token.logprob - other.token.logprob)
                if difference > MARGIN:
                    tally.errors.append(f"{what}: log probabilities are {difference:.1e} apart")

    def _gap(
        self,
        prompt: Sequence[int],
        expected: CompletionOutput,
        actual: CompletionOutput,
        place: int,
    ) -> float:
        """How far apart the logits of the tokens are at which two outputs part."""
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, detokenize=False)
        prefix = [*prompt, *expected.token_ids[:place]]
        [output] = self._reference.generate([prefix], params)
        [entry] = output.outputs[0].logprobs or []
        found = {one.token_id: one.logprob for one in entry.top}
        one, other = expected.token_ids[place], actual.token_ids[place]
        return abs(found.get(one, float("inf")) - found.get(other, float("-inf")))


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def answers(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], batch_size: int
) -> list[CompletionOutput]:
    """Answers to all prompts, so many at once."""
    found: list[CompletionOutput] = []
    for start in range(0, len(prompts), batch_size):
        chosen = slice(start, start + batch_size)
        outputs = llm.generate(list(prompts[chosen]), list(params[chosen]))
        found += [output.outputs[0] for output in outputs]
    return found


@dataclass(slots=True)
class Case:
    """What one way asks, and what is expected."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    expected: list[CompletionOutput]


def expect(
    reference: LLM, prompts: dict[str, list[list[int]]], arguments: argparse.Namespace
) -> dict[str, Case]:
    """The answers without drafts, by way."""
    every = [prompt for several in prompts.values() for prompt in several]
    few = [prompt for several in prompts.values() for prompt in several[: arguments.few]]
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
    seen = answers(reference, every, [params] * len(every), LARGE)
    by_prompt = {tuple(prompt): one for prompt, one in zip(every, seen, strict=True)}
    cases = {}
    for name in arguments.ways:
        way = WAYS[name]
        chosen = every if way.has_all else few
        asked = [
            way.make_params(index, params, by_prompt[tuple(prompt)])
            for index, prompt in enumerate(chosen)
        ]
        expected = (
            [by_prompt[tuple(prompt)] for prompt in chosen]
            if way.make_params is plain
            else answers(reference, chosen, asked, LARGE)
        )
        cases[name] = Case(chosen, asked, expected)
        print(f"answered without drafts: {name}", file=sys.stderr, flush=True)
    return cases


def check(
    settings: dict[str, Any], cases: dict[str, Case], comparison: Comparison
) -> dict[str, Tally]:
    """Run a drafter in all ways."""
    tallies = {name: Tally() for name in cases}
    for is_small in (False, True):
        chosen = {
            name: case for name, case in cases.items() if WAYS[name].is_cache_small is is_small
        }
        if not chosen:
            continue
        if is_small:
            longest = max(
                len(prompt) + (params.max_tokens or 0)
                for case in chosen.values()
                for prompt, params in zip(case.prompts, case.params, strict=True)
            )
            settings = settings | {
                "max_model_len": longest,
                "cache": {"num_blocks": -(-longest // BLOCK_SIZE) + 4, "block_size": BLOCK_SIZE},
            }
        with LLM(**settings) as llm:
            for name, case in chosen.items():
                actual = answers(llm, case.prompts, case.params, WAYS[name].batch_size)
                for prompt, one, other in zip(case.prompts, case.expected, actual, strict=True):
                    comparison.add(tallies[name], prompt, one, other)
                if is_small and not tallies[name].num_preemptions:
                    tallies[name].errors.append("nothing was preempted: the cache isn't small")
    return tallies


def main() -> None:
    """Compare, print and tell by the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ngram", action="store_true")
    for name in ("eagle", "medusa", "draft_model"):
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="PATH")
    parser.add_argument("--engine", action="append", default=[], metavar="LABEL=JSON")
    parser.add_argument("--spec-decode", default='{"adaptive": false}', metavar="JSON")
    parser.add_argument("--settings", default="{}", metavar="JSON", help="of all engines")
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--per-category", type=int, default=1000, help="questions in batch 32")
    parser.add_argument("--few", type=int, default=2, help="per category, in other ways")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-prompt-tokens", type=int, default=1600)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    drafters = chosen_engines(arguments)
    if not drafters:
        parser.error("no drafter to check; allowed: --ngram, --eagle PATH and so on, --engine")
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_num_seqs": LARGE,
        "max_model_len": arguments.max_prompt_tokens + arguments.max_tokens,
        **json.loads(arguments.settings),
    }
    found: dict[str, dict[str, Tally]] = {}
    with LLM(**settings) as reference:
        questions = read_questions(arguments.questions, arguments.per_category)
        prompts = prompts_of(
            reference, questions, arguments.max_tokens, arguments.max_prompt_tokens
        )
        cases = expect(reference, prompts, arguments)
        comparison = Comparison(reference)
        for label, spec_decode in drafters.items():
            found[label] = check(settings | {"spec_decode": spec_decode}, cases, comparison)
            for name, tally in found[label].items():
                print(f"{label}, {name}: {tally}", flush=True)
                for text in (*tally.excuses, *tally.errors):
                    print(f"  {text}")
    tallies = [tally for ways in found.values() for tally in ways.values()]
    num_tokens = sum(tally.num_tokens for tally in tallies)
    num_excuses = sum(len(tally.excuses) for tally in tallies)
    num_errors = sum(len(tally.errors) for tally in tallies)
    print(f"{num_tokens} tokens equal, {num_excuses} excuses, {num_errors} errors")
    if arguments.output:
        result = {
            label: {name: asdict(tally) for name, tally in ways.items()}
            for label, ways in found.items()
        }
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    if num_errors or not num_tokens:
        sys.exit(1)


if __name__ == "__main__":
    main()
