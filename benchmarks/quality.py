"""How far weight formats, kernels and KV pages move a model's predictions away from float32.

Fixed texts run through the model once in float32 with plain torch operations, and once per variant:
the same tokens, teacher-forced, in windows of 512. Reported per variant, over all positions:

- KL divergence of its distribution from that of float32, in nats;
- perplexity of the next token of the text;
- argmax agreement: the share of positions where its most likely token is that of float32.

The texts: the Apache license, pages of Python's own manual, and answers that the float32 model
gives to fixed questions (greedy). The components are those that the engine would run; a GGUF file
is compared with its own values, dequantized. JSON goes into --output, a table to standard output.

    python benchmarks/quality.py [MODEL] [--variants cpu-int8 ...] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from hotshoe import LLM, SamplingParams
from hotshoe.api import Component, ModelCapabilities
from hotshoe.bench.machine import describe_machine, describe_versions
from hotshoe.plugins import PluginRegistry
from hotshoe.testing.forward import DirectRunner, Parts
from hotshoe.weights.checkpoint import open_checkpoint

WINDOW = 512
BLOCK_SIZE = 16
MANUAL_PAGES = ("execmodel", "naming", "with", "exceptions")
MAX_TOKENS_OF_A_PAGE = 1024
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain how a bicycle stays upright.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Give me three tips for sleeping better.",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "What is the difference between a virus and a bacterium?",
    "A train travels 120 km in 90 minutes. How fast is it?",
    "Summarize the plot of Romeo and Juliet in three sentences.",
    "How do I make pancakes?",
    "Translate 'Good morning, how are you?' into Spanish.",
    "List five large cities in Asia.",
    "What does an operating system do?",
    "Write an email that declines a meeting politely.",
    "What caused the First World War?",
    "Explain recursion to a child.",
)
MAX_ANSWER_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Variant:
    """The components that run the model; options are those of the quantization, and without a
    ``kv_dtype`` the KV pages have the dtype of the rest.
    """

    kernels: str
    attention: str
    quantization: str = "none"
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


REFERENCE = Variant("torch", "torch_sdpa", dtype="float32")
VARIANTS = {
    "torch-bf16": Variant("torch", "torch_sdpa"),
    "cpu-bf16": Variant("cpu", "cpu"),
    "cpu-bf16-kv-int8": Variant("cpu", "cpu", kv_dtype="int8"),
    "cpu-int8": Variant("cpu", "cpu", "int8"),
    "cpu-int8-rows": Variant("cpu", "cpu", "int8", options={"scales": "row"}),
    "cpu-gguf": Variant("cpu", "cpu", "gguf"),
}


@dataclass(slots=True)
class Score:
    """Sums over positions."""

    num_positions: int = 0
    num_agreeing: int = 0
    kl: float = 0.0
    log_loss: float = 0.0
    by_text: dict[str, Score] = field(default_factory=dict)

    def add(self, logits: Tensor, reference_logprobs: Tensor, targets: Tensor) -> None:
        """Compare ``[n, vocab_size]`` logits with the reference's logprobs of the same positions.

        Args:
            logits: any dtype.
            reference_logprobs: float32.
            targets: ``[n]``, the tokens that follow in the text.
        """
        logprobs = logits.float().log_softmax(-1)
        divergence = reference_logprobs.exp() * (reference_logprobs - logprobs)
        self.num_positions += len(targets)
        self.num_agreeing += int((logprobs.argmax(-1) == reference_logprobs.argmax(-1)).sum())
        self.kl += float(divergence.sum(dtype=torch.float64))
        self.log_loss -= float(logprobs.gather(1, targets[:, None]).sum(dtype=torch.float64))

    def summary(self) -> dict[str, Any]:
        """Means, also by kind of text."""
        number = self.num_positions
        means: dict[str, Any] = {
            "num_positions": number,
            "kl": round(self.kl / number, 5),
            "perplexity": round(float(torch.tensor(self.log_loss / number).exp()), 4),
            "agreement": round(self.num_agreeing / number, 4),
        }
        if self.by_text:
            means["by_text"] = {name: one.summary() for name, one in self.by_text.items()}
        return means


def load(model: str, variant: Variant) -> DirectRunner:
    """The model with a variant's components."""
    registry = PluginRegistry()
    with open_checkpoint(model) as checkpoint:
        max_model_len = min(checkpoint.config["max_position_embeddings"], WINDOW)
        parts = Parts(
            model=_model_component(registry, checkpoint.config["architectures"][0]),
            attention=registry.load("attention", variant.attention).component,
            kernels=registry.load("kernels", variant.kernels).component,
            quantization=registry.load("quantization", variant.quantization).component,
            quantization_options=variant.options,
        )
        return DirectRunner(
            checkpoint.config,
            checkpoint.tensors(),
            parts,
            dtype=getattr(torch, variant.dtype),
            kv_dtype=getattr(torch, variant.kv_dtype or variant.dtype),
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=4096 // BLOCK_SIZE,
            checkpoint_format=checkpoint.format,
        )


def _model_component(registry: PluginRegistry, architecture: str) -> Component:
    for info in registry.builtins("models"):
        component = registry.load("models", info.name).component
        offered = component.capabilities
        if isinstance(offered, ModelCapabilities) and architecture in offered.architectures:
            return component
    raise SystemExit(f"no model plugin of hotshoe's knows architecture {architecture!r}")


def texts(model: str) -> dict[str, list[list[int]]]:
    """Token ids by kind of text, in windows of at most ``WINDOW``."""
    license_text = (Path(__file__).parents[1] / "LICENSE").read_text("utf-8")
    with LLM(model, dtype="float32", max_model_len=WINDOW, kernels="torch") as llm:
        pages = [llm.tokenizer.encode(topics[page])[:MAX_TOKENS_OF_A_PAGE] for page in MANUAL_PAGES]
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        greedy = SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS)
        answers = llm.chat(conversations, greedy)
        found = {
            "license": [llm.tokenizer.encode(license_text)[:MAX_TOKENS_OF_A_PAGE]],
            "manual": pages,
            "answers": [
                [*answer.prompt_token_ids, *answer.outputs[0].token_ids] for answer in answers
            ],
        }
    return {
        kind: [window for document in documents for window in _windows(document)]
        for kind, documents in found.items()
    }


def _windows(token_ids: Sequence[int]) -> Iterator[list[int]]:
    for start in range(0, len(token_ids) - 1, WINDOW):
        yield list(token_ids[start : start + WINDOW])


def compare(model: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Summaries by variant, and of the reference itself."""
    windows = texts(model)
    runners = {"float32": load(model, REFERENCE)}
    for name in names:
        print(f"loading {name}", file=sys.stderr)
        runners[name] = load(model, VARIANTS[name])
    scores = {name: Score() for name in runners}
    for kind, token_lists in windows.items():
        for index, token_ids in enumerate(token_lists):
            print(f"{kind} {index + 1} of {len(token_lists)}", file=sys.stderr)
            _score_window(runners, scores, kind, token_ids)
    return {name: score.summary() for name, score in scores.items()}


def _score_window(
    runners: Mapping[str, DirectRunner],
    scores: Mapping[str, Score],
    kind: str,
    token_ids: Sequence[int],
) -> None:
    """Each runner's logits of one window are compared and forgotten."""
    targets = torch.tensor(token_ids[1:])
    reference: Tensor | None = None
    for name, runner in runners.items():
        logits = runner.step({"window": token_ids})["window"][:-1]
        runner.forget("window")
        if reference is None:
            reference = logits.float().log_softmax(-1)
        scores[name].add(logits, reference, targets)
        scores[name].by_text.setdefault(kind, Score()).add(logits, reference, targets)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = ["| variant | KL from float32 | perplexity | argmax agreement |", "|---|---|---|---|"]
    for name, result in results.items():
        agreement = f"{result['agreement']:.1%}"
        lines.append(f"| {name} | {result['kl']:.4f} | {result['perplexity']:.3f} | {agreement} |")
    return "\n".join(lines)


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = compare(arguments.model, arguments.variants)
    report = {
        "model": arguments.model,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "command": shlex.join(["python", "benchmarks/quality.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "variants": {name: asdict(VARIANTS[name]) for name in arguments.variants},
        "results": results,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
