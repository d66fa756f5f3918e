"""What drafts bring: speed of a single stream by kind of question, and how many drafts are kept.

Engines that differ in their drafter alone live side by side in one process and answer each question
in turn, round after round, so that whatever else the machine does hits all of them: what it can do
may differ by half from one minute to the next. Each question is asked alone. Later turns of a
conversation follow the answers that the engine without drafts gave. Speeds behind the first token
leave out what a drafter does with a prompt; the total ones have it. JSON goes into --output, tables
to standard output.

    python benchmarks/drafts.py --ngram --eagle FOLDER --medusa FOLDER
    python benchmarks/drafts.py --engine 'short chains={"name": "ngram", "options": {...}}'
    python benchmarks/drafts.py --eagle FOLDER --acceptance-only --questions held_out.jsonl

A file of questions has one object a line with a category and turns, a list of texts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from hotshoe import LLM, RequestOutput, SamplingParams
from hotshoe.api import StepRecord
from hotshoe.bench.machine import ForeignLoad, describe_machine, describe_versions

QUESTIONS = Path(__file__).with_name("questions.jsonl")
PLAIN = "no drafts"
CONVERSATION = "conversation"


@dataclass(frozen=True, slots=True)
class Question:
    """Texts that a user says one after the other."""

    category: str
    turns: Sequence[str]


@dataclass(slots=True)
class Counts:
    """What became of drafts over some steps.

    Attributes:
        num_steps: in which the target computed something behind a first token.
        num_tokens: that these brought.
        num_drafts: steps that verified drafts.
        accepted: how many of them kept the draft at each place.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    draft_s: float = 0.0

    def add(self, step: StepRecord) -> None:
        """Count a step; those that prefill don't count."""
        if step.num_prefill_tokens:
            return
        self.num_steps += len(step.request_ids)
        self.num_tokens += step.num_new_tokens
        self.num_drafts += step.num_drafts
        self.num_draft_tokens += step.num_draft_tokens
        self.draft_s += step.timings_s.get("draft", 0.0)
        longest = max(len(self.accepted), len(step.accepted_per_position))
        sums = [0] * longest
        for counts in (self.accepted, step.accepted_per_position):
            for place, count in enumerate(counts):
                sums[place] += count
        self.accepted = sums

    def figures(self) -> dict[str, Any]:
        """Tokens a step, and the share of drafts that was kept, in all and at each place."""
        kept = sum(self.accepted)
        return {
            "tokens_per_step": round(self.num_tokens / max(self.num_steps, 1), 3),
            "drafts_per_step": round(self.num_draft_tokens / max(self.num_steps, 1), 3),
            "acceptance": round(kept / max(self.num_draft_tokens, 1), 3),
            "acceptance_per_position": [
                round(count / max(self.num_drafts, 1), 3) for count in self.accepted
            ],
            "draft_ms_per_step": round(1e3 * self.draft_s / max(self.num_steps, 1), 3),
        }


@dataclass(slots=True)
class Times:
    """What answers of a round took, in all and behind the first token of each."""

    num_tokens: int = 0
    num_decoded: int = 0
    total_s: float = 0.0
    decode_s: float = 0.0

    def add(self, output: RequestOutput, elapsed_s: float) -> None:
        """Count an answer."""
        times = output.outputs[0].metrics.token_times_s
        self.num_tokens += len(times)
        self.num_decoded += len(times) - 1
        self.total_s += elapsed_s
        self.decode_s += times[-1] - times[0]


@dataclass(slots=True)
class Engine:
    """One engine, and what it has been seen to do, by category."""

    label: str
    llm: LLM
    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)
    total_per_s: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)

    def answer(
        self, category: str, prompts: Sequence[list[int]], params: SamplingParams, *, together: bool
    ) -> list[RequestOutput]:
        """Answer prompts of a category, one after the other or all at once."""
        counts = self.counts.setdefault(category, Counts())
        self.llm.engine.step_observers.append(counts.add)
        try:
            if together:
                return self.llm.generate(list(prompts), params)
            outputs = []
            time_of = self.times.setdefault(category, Times())
            for prompt in prompts:
                started = time.perf_counter()
                [output] = self.llm.generate([prompt], params)
                time_of.add(output, time.perf_counter() - started)
                outputs.append(output)
        finally:
            self.llm.engine.step_observers.remove(counts.add)
        return outputs

    def end_round(self) -> None:
        """Keep the speeds of a round."""
        for category, times in self.times.items():
            decoded = times.num_decoded / times.decode_s if times.decode_s else 0.0
            self.tokens_per_s.setdefault(category, []).append(decoded)
            self.total_per_s.setdefault(category, []).append(times.num_tokens / times.total_s)
        self.times.clear()


def read_questions(path: Path, per_category: int) -> list[Question]:
    """Questions of a file, so many of each category; those with several turns are one category."""
    found: dict[str, list[Question]] = {}
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        turns = record["turns"]
        category = CONVERSATION if len(turns) > 1 else record["category"]
        found.setdefault(category, []).append(Question(category, turns))
    chosen = []
    for several in found.values():
        # spread over the file: a category may have kinds of its own
        step = max(len(several) // per_category, 1)
        chosen += several[::step][:per_category]
    return chosen


def prompts_of(
    llm: LLM, questions: Sequence[Question], max_tokens: int, max_prompt_tokens: int
) -> dict[str, list[list[int]]]:
    """Prompts by category, one per turn; too long ones are left out."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    prompts: dict[str, list[list[int]]] = {}
    for question in questions:
        messages: list[dict[str, str]] = []
        for place, turn in enumerate(question.turns):
            messages.append({"role": "user", "content": turn})
            prompt = llm.tokenizer.apply_chat_template(messages)
            token_ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            if len(token_ids) > max_prompt_tokens:
                print(f"left out: {len(token_ids)} tokens, {question.category}", file=sys.stderr)
                break
            prompts.setdefault(question.category, []).append(token_ids)
            if place + 1 < len(question.turns):
                [output] = llm.generate([token_ids], params)
                messages.append({"role": "assistant", "content": output.outputs[0].text})
    return prompts


def measure(
    engines: Sequence[Engine],
    prompts: Mapping[str, Sequence[list[int]]],
    params: SamplingParams,
    rounds: int,
) -> dict[str, Any]:
    """Let the engines answer each question in turn; each time another one begins."""
    load = ForeignLoad()
    answers: dict[str, dict[str, list[Sequence[int]]]] = {}
    for engine in engines:  # what is compiled or recorded once isn't measured
        for several in prompts.values():
            engine.llm.generate([several[0]], params)
    for number in range(rounds):
        for category, several in prompts.items():
            found = answers[category] = {engine.label: [] for engine in engines}
            for at, prompt in enumerate(several):
                for offset in range(len(engines)):
                    engine = engines[(number + at + offset) % len(engines)]
                    [output] = engine.answer(category, [prompt], params, together=False)
                    found[engine.label].append(output.outputs[0].token_ids)
        for engine in engines:
            engine.end_round()
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    plain = engines[0]
    return {
        "foreign_cpu_share": load.share(),
        "engines": {
            engine.label: {
                category: {
                    "tokens_per_s": _spread(engine.tokens_per_s[category]),
                    "total_tokens_per_s": _spread(engine.total_per_s[category]),
                    "ratio": _ratio(engine.tokens_per_s[category], plain.tokens_per_s[category]),
                    "total_ratio": _ratio(
                        engine.total_per_s[category], plain.total_per_s[category]
                    ),
                    "equal_answers": sum(
                        list(one) == list(other)
                        for one, other in zip(
                            answers[category][engine.label],
                            answers[category][plain.label],
                            strict=True,
                        )
                    ),
                    **engine.counts[category].figures(),
                }
                for category in prompts
            }
            for engine in engines
        },
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


def _ratio(values: Sequence[float], plain: Sequence[float]) -> float:
    """Median over the rounds, each compared with itself."""
    return round(median(one / other for one, other in zip(values, plain, strict=True)), 3)


def acceptance(
    engines: Sequence[Engine],
    prompts: Mapping[str, Sequence[list[int]]],
    params: SamplingParams,
) -> dict[str, Any]:
    """One run, many requests at once, without times."""
    for engine in engines:
        for category, several in prompts.items():
            engine.answer(category, several, params, together=True)
    return {
        "engines": {
            engine.label: {name: counts.figures() for name, counts in engine.counts.items()}
            for engine in engines
        }
    }


def tables(result: Mapping[str, Any]) -> Iterator[str]:
    """Markdown."""
    engines = result["engines"]
    categories = list(next(iter(engines.values())))
    heading = "| | " + " | ".join(categories) + " |"
    rule = "|---" * (len(categories) + 1) + "|"
    has_times = "ratio" in next(iter(engines.values()))[categories[0]]
    if has_times:
        yield "Output tokens per second behind the first, median (least to most), and the ratio:"
        yield from ("", f"{heading} mean |", f"{rule}---|")
        for label, by_category in engines.items():
            cells = [_speed_cell(by_category[one]) for one in categories]
            mean = geometric_mean(by_category[one]["ratio"] for one in categories)
            yield f"| {label} | " + " | ".join(cells) + f" | **{mean:.2f}** |"
        yield ""
    yield "Tokens per step, and the share of requests whose draft was kept, by place in the chain:"
    yield from ("", heading, rule)
    for label, by_category in engines.items():
        if label == PLAIN:
            continue
        cells = []
        for one in categories:
            figures = by_category[one]
            kept = " ".join(f"{share:.2f}" for share in figures["acceptance_per_position"])
            cells.append(f"**{figures['tokens_per_step']:.2f}** ({kept})")
        yield f"| {label} | " + " | ".join(cells) + " |"


def _speed_cell(figures: Mapping[str, Any]) -> str:
    speed = figures["tokens_per_s"]
    spread = f"{speed['median']:.0f} ({speed['min']:.0f} to {speed['max']:.0f})"
    return f"{spread}, **{figures['ratio']:.2f}**"


def chosen_engines(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """``spec_decode`` settings by label."""
    common = json.loads(arguments.spec_decode)
    chosen: dict[str, dict[str, Any]] = {}
    if arguments.ngram:
        chosen["ngram"] = {"name": "ngram", **common}
    for name in ("eagle", "medusa", "draft_model"):
        if path := getattr(arguments, name):
            chosen[name] = {"name": name, "options": {"model": path}, **common}
    for text in arguments.engine:
        label, _, settings = text.partition("=")
        chosen[label] = json.loads(settings)
    return chosen


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ngram", action="store_true", help="measure n-gram drafts")
    for name in ("eagle", "medusa", "draft_model"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, metavar="PATH", help=f"measure {name} with this checkpoint")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="LABEL=JSON",
        help="one more, by the settings of its section spec_decode",
    )
    parser.add_argument(
        "--spec-decode",
        default="{}",
        metavar="JSON",
        help="further settings of the section for the named drafters",
    )
    parser.add_argument(
        "--settings",
        default="{}",
        metavar="JSON",
        help='of all engines, such as {"quantization": "gguf"}',
    )
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--per-category", type=int, default=5, help="questions")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-prompt-tokens", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--acceptance-only", action="store_true", help="no times, in large batches")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    chosen = chosen_engines(arguments)
    if not chosen:
        parser.error("no drafter to measure; allowed: --ngram, --eagle PATH and so on, --engine")
    settings: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_model_len": arguments.max_prompt_tokens + arguments.max_tokens,
        # a question that comes again isn't to be known already
        "enable_prefix_caching": False,
        **json.loads(arguments.settings),
    }
    params = SamplingParams(
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        seed=1,
        detokenize=False,
    )
    engines = [Engine(PLAIN, LLM(**settings))]
    try:
        engines += [
            Engine(label, LLM(**settings, spec_decode=one)) for label, one in chosen.items()
        ]
        questions = read_questions(arguments.questions, arguments.per_category)
        prompts = prompts_of(
            engines[0].llm, questions, arguments.max_tokens, arguments.max_prompt_tokens
        )
        if arguments.acceptance_only:
            found = acceptance(engines[1:], prompts, params)
        else:
            found = measure(engines, prompts, params, arguments.rounds)
    finally:
        for engine in engines:
            engine.llm.close()
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": settings,
        "drafters": chosen,
        "num_prompts": {category: len(several) for category, several in prompts.items()},
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        **found,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(tables(result)))


if __name__ == "__main__":
    main()
