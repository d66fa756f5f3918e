"""The arguments of ``hotshoe bench serve``: what they are, and the load that they describe."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotshoe.bench.datasets import (
    PlannedRequest,
    Range,
    file_requests,
    prefix_requests,
    random_requests,
    trace_requests,
)
from hotshoe.bench.load import PATHS
from hotshoe.bench.prompts import PromptSource, TokenSource, WordSource
from hotshoe.bench.serving_metrics import OBJECTIVES
from hotshoe.config.values import config_error
from hotshoe.entrypoints.cli.engine_arguments import CommandParser
from hotshoe.entrypoints.cli.server_arguments import add_server_arguments

_DESCRIPTION = """\
Send load to an OpenAI-compatible server and report throughput, latencies and errors.

datasets:
  random   prompts with nothing in common
  prefix   --num-prefixes beginnings, each with --num-prompts / --num-prefixes endings
  jsonl    lines of --dataset-path with "prompt", "turns" or "messages"
  trace    times and lengths from --dataset-path: CSV with TIMESTAMP,ContextTokens,GeneratedTokens,
           or JSON lines with timestamp, input_length, output_length and hash_ids

Without --tokenizer a prompt is made of common words, one for each token, and the results say how
many tokens the server counted. With the tokenizer of the model, lengths are exact for completions.

examples:
  hotshoe bench serve --url http://127.0.0.1:8000 --max-concurrency 32
  hotshoe bench serve --dataset jsonl --dataset-path prompts.jsonl --request-rate 4
  hotshoe bench serve --dataset trace --dataset-path trace.csv --time-scale 2 \\
      --max-total-len 4096 --goodput ttft:500 tpot:50 --output result.json"""

_ONLY_FOR = {
    "input_len": ("random", "prefix"),
    "num_prefixes": ("prefix",),
    "prefix_len": ("prefix",),
    "dataset_path": ("jsonl", "trace"),
    "sample": ("jsonl", "trace"),
    "time_scale": ("trace",),
    "length_scale": ("trace",),
    "max_total_len": ("trace",),
    "tokenizer": ("random", "prefix", "trace"),
}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the arguments.

    Raises:
        ConfigError: if one is wrong, or of no use with the dataset.
    """
    arguments = _parser().parse_args(argv)
    _check(arguments)
    if arguments.endpoint is None:
        arguments.endpoint = "chat" if arguments.dataset == "jsonl" else "completions"
    if arguments.ignore_eos is None:
        arguments.ignore_eos = arguments.dataset != "jsonl"
    return arguments


def _parser() -> CommandParser:
    parser = CommandParser("hotshoe bench serve", _DESCRIPTION)
    server = parser.add_argument_group("server")
    where = "where the server listens (default: http://127.0.0.1:8000)"
    add_server_arguments(server, url="http://127.0.0.1:8000", help=where)
    server.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    server.add_argument(
        "--endpoint", choices=[*PATHS], help="default: chat for jsonl, else completions"
    )
    _add_dataset_arguments(parser)
    _add_load_arguments(parser)
    output = parser.add_argument_group("results")
    output.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        default=[],
        help=f"count requests within these latencies; names: {', '.join(OBJECTIVES)}",
    )
    output.add_argument("--json", action="store_true", help="print the result as JSON")
    output.add_argument("--output", metavar="FILE", help="write the result to a file as JSON")
    output.add_argument(
        "--save-requests", action="store_true", help="with every request's times in the JSON"
    )
    return parser


def _add_dataset_arguments(parser: CommandParser) -> None:
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset", choices=["random", "prefix", "jsonl", "trace"], default="random"
    )
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="for jsonl and trace")
    group.add_argument(
        "--num-prompts",
        type=_count,
        metavar="N",
        help="requests, or conversations (default: 100; jsonl and trace: all)",
    )
    group.add_argument(
        "--sample",
        action="store_true",
        default=None,
        help="jsonl, trace: take --num-prompts at random, not the first",
    )
    group.add_argument(
        "--input-len", type=_range, metavar="MIN:MAX", help="tokens of a prompt (default: 256)"
    )
    group.add_argument(
        "--output-len",
        type=_range,
        metavar="MIN:MAX",
        help="tokens to generate; jsonl takes one number, trace has its own (default: 128)",
    )
    group.add_argument("--num-prefixes", type=_count, metavar="K", help="default: 4")
    group.add_argument("--prefix-len", type=_count, metavar="N", help="default: 512")
    group.add_argument(
        "--time-scale", type=_positive, metavar="X", help="multiplies the times of a trace"
    )
    group.add_argument(
        "--length-scale", type=_positive, metavar="X", help="multiplies the lengths of a trace"
    )
    group.add_argument(
        "--max-total-len", type=_count, metavar="N", help="leave out longer requests of a trace"
    )
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="folder, GGUF file, hub id or 'embedded': makes lengths exact",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random")


def _add_load_arguments(parser: CommandParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=_positive,
        default=None,
        metavar="X",
        help="per second on average (default: all at once; a trace: its own times)",
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="X",
        help="1: a Poisson process; less: in bursts; more: evenly (default: 1)",
    )
    group.add_argument(
        "--max-concurrency", type=_count, metavar="N", help="most requests under way"
    )
    group.add_argument(
        "--timeout-s", type=_positive, default=600.0, metavar="X", help="for a request"
    )
    group.add_argument(
        "--num-warmups", type=int, default=1, metavar="N", help="requests before (default: 1)"
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="send ignore_eos, an extension, for outputs of full length (default: unless jsonl)",
    )
    group.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="further fields of a request"
    )


def _check(arguments: argparse.Namespace) -> None:
    """Refuse flags that the dataset has no use for."""
    dataset = arguments.dataset
    problems = [
        f"--{name.replace('_', '-')}: the {dataset} dataset has no use for it; it is for "
        f"{' and '.join(datasets)}"
        for name, datasets in _ONLY_FOR.items()
        if getattr(arguments, name) is not None and dataset not in datasets
    ]
    is_file = dataset in ("jsonl", "trace")
    if is_file and arguments.dataset_path is None:
        problems.append(f"--dataset-path: the {dataset} dataset needs a file")
    lengths = arguments.output_len
    if dataset == "trace" and lengths is not None:
        problems.append("--output-len: a trace has its own lengths; use --length-scale")
    if dataset == "jsonl" and lengths is not None and lengths[0] != lengths[1]:
        problems.append("--output-len: the jsonl dataset takes one number, not a range")
    if arguments.sample and arguments.num_prompts is None:
        problems.append("--sample: needs --num-prompts, the number to take")
    num_prefixes = arguments.num_prefixes or 4
    if dataset == "prefix" and (arguments.num_prompts or 100) % num_prefixes:
        problems.append(
            f"--num-prompts: got {arguments.num_prompts or 100}, allowed: a multiple of "
            f"--num-prefixes, which is {num_prefixes}"
        )
    if problems:
        raise config_error(problems)


def make_dataset(arguments: argparse.Namespace) -> tuple[list[PlannedRequest], dict[str, Any]]:
    """The requests to send, and what the result says of them."""
    num_prompts: int | None = arguments.num_prompts
    seed: int = arguments.seed
    facts: dict[str, Any] = {"name": arguments.dataset, "seed": seed}
    if arguments.dataset == "jsonl":
        facts |= {"path": str(arguments.dataset_path), "sample": bool(arguments.sample)}
        requests = file_requests(
            arguments.dataset_path,
            num_prompts=num_prompts,
            sample=bool(arguments.sample),
            seed=seed,
            allow_chat=arguments.endpoint == "chat",
        )
        return requests, facts | {"num_prompts": len(requests)}
    source = _source(arguments)
    facts["tokenizer"] = arguments.tokenizer
    if arguments.dataset == "trace":
        return _trace(arguments, source, facts)
    lengths: dict[str, Any] = {
        "input_len": arguments.input_len or (256, 256),
        "output_len": arguments.output_len or (128, 128),
    }
    if arguments.dataset == "random":
        requests = random_requests(source, num_prompts=num_prompts or 100, seed=seed, **lengths)
        return requests, facts | {"num_prompts": len(requests), **lengths}
    num_prefixes = arguments.num_prefixes or 4
    prefixes: dict[str, Any] = {
        "num_prefixes": num_prefixes,
        "num_per_prefix": (num_prompts or 100) // num_prefixes,
        "prefix_len": arguments.prefix_len or 512,
    }
    requests = prefix_requests(source, seed=seed, **prefixes, **lengths)
    return requests, facts | {"num_prompts": len(requests), **prefixes, **lengths}


def _trace(
    arguments: argparse.Namespace, source: PromptSource, facts: dict[str, Any]
) -> tuple[list[PlannedRequest], dict[str, Any]]:
    settings: dict[str, Any] = {
        "sample": bool(arguments.sample),
        "time_scale": arguments.time_scale or 1.0,
        "length_scale": arguments.length_scale or 1.0,
        "max_total_len": arguments.max_total_len,
    }
    requests, num_left_out = trace_requests(
        source,
        arguments.dataset_path,
        num_prompts=arguments.num_prompts,
        seed=arguments.seed,
        **settings,
    )
    if arguments.request_rate is not None:
        requests = [PlannedRequest(turns=one.turns, output_len=one.output_len) for one in requests]
    found = {"path": str(arguments.dataset_path), "num_prompts": len(requests)}
    return requests, facts | found | settings | {"num_left_out": num_left_out}


def _source(arguments: argparse.Namespace) -> PromptSource:
    if arguments.tokenizer is None:
        return WordSource()
    from hotshoe.text.tokenizer import load_tokenizer
    from hotshoe.weights.checkpoint import open_checkpoint

    with open_checkpoint(arguments.tokenizer) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    return TokenSource(tokenizer, as_text=arguments.endpoint == "chat")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: 1 or more")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: more than 0")
    return number


def _range(text: str) -> Range:
    low, colon, high = text.partition(":")
    least, most = _count(low), _count(high if colon else low)
    if least > most:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: MIN:MAX with MIN <= MAX")
    return least, most


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a JSON object")
    return value
