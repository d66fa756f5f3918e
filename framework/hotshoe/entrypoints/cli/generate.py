"""``hotshoe generate``: complete prompts from the command line or standard input."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hotshoe.config.values import config_error
from hotshoe.entrypoints.cli.engine_arguments import CommandParser, parse_engine_arguments
from hotshoe.entrypoints.cli.sampling_arguments import add_sampling_arguments, given_sampling
from hotshoe.entrypoints.cli.session import QUIET, start, stream, tolerate_any_bytes

if TYPE_CHECKING:
    from hotshoe.api import PositionLogprobs
    from hotshoe.engine.request import RequestMetrics
    from hotshoe.entrypoints.outputs import CompletionOutput, RequestOutput

MAX_TOKENS = 128

_DESCRIPTION = f"""\
Complete prompts with the model. Prompts are plain text; hotshoe chat applies the chat template.

--seed is the engine's, from which a request without a seed of its own gets one; --sampling-seed is
the request's own. Either makes a run repeatable.

{QUIET}"""


def run(argv: list[str]) -> int:
    """Complete the prompts; 1 if one of them failed while it ran."""
    resolved, arguments = parse_engine_arguments(_parser(), argv)
    given = {"max_tokens": MAX_TOKENS} | given_sampling(arguments)
    prompts = _prompts(arguments)
    is_streamed = _is_streamed(arguments, len(prompts), given)
    if not arguments.json:
        _refuse_what_only_json_shows(given)
    with start(resolved) as llm:
        params = llm.default_sampling_params(**given)
        if is_streamed:
            stream(llm, prompts[0], params)
            return 0
        show_progress = len(prompts) > 1 and sys.stderr.isatty()
        outputs = llm.generate(prompts, params, use_tqdm=show_progress, on_error="return")
        return _print_all(outputs, as_json=arguments.json)


def _refuse_what_only_json_shows(given: dict[str, Any]) -> None:
    if not given.get("detokenize", True):
        raise config_error(["--no-detokenize leaves no text to print; add --json"])
    for name in ("logprobs", "prompt_logprobs"):
        if given.get(name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise config_error([f"{flag} is shown in JSON only; add --json or drop it"])


def _parser() -> CommandParser:
    parser = CommandParser("hotshoe generate", _DESCRIPTION)
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="+", help="text to complete; - reads it from stdin"
    )
    parser.add_argument(
        "--lines", action="store_true", help="with -, every line that is not empty is a prompt"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per prompt, with token ids, logprobs, metrics and why it ended",
    )
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print the text as it comes (default: if there is one prompt with one choice)",
    )
    add_sampling_arguments(parser, max_tokens=str(MAX_TOKENS))
    return parser


def _prompts(arguments: argparse.Namespace) -> list[str]:
    prompts: list[str] = arguments.prompts
    if arguments.lines and "-" not in prompts:
        raise config_error(["--lines is about prompts from stdin; give - as the prompt"])
    if prompts.count("-") > 1:
        raise config_error(["- is given twice, but stdin can be read only once"])
    if "-" in prompts:
        tolerate_any_bytes()
        text = sys.stdin.read()
        read = [line for line in text.splitlines() if line.strip()] if arguments.lines else [text]
        at = prompts.index("-")
        prompts = [*prompts[:at], *(one.removesuffix("\n") for one in read), *prompts[at + 1 :]]
    if not prompts:
        raise config_error(["stdin holds no line with a prompt"])
    return prompts


def _is_streamed(arguments: argparse.Namespace, num_prompts: int, given: dict[str, Any]) -> bool:
    is_possible = num_prompts == 1 and given.get("n", 1) == 1 and not arguments.json
    if arguments.stream and not is_possible:
        raise config_error(["--stream needs a single prompt, n of 1, and no --json; drop it"])
    return is_possible and arguments.stream is not False


def _print_all(outputs: Sequence[RequestOutput], *, as_json: bool) -> int:
    num_failed = 0
    for number, output in enumerate(outputs, start=1):
        failed = [one for one in output.outputs if one.finish_reason == "error"]
        num_failed += len(failed)
        if as_json:
            print(json.dumps(as_record(output), ensure_ascii=False, allow_nan=False))
            continue
        for choice in output.outputs:
            if len(outputs) > 1 or len(output.outputs) > 1:
                print(f"--- prompt {number}, choice {choice.index}: {output.prompt!r:.60}")
            print(choice.text)
        for choice in failed:
            print(f"error: prompt {number}: {choice.error}", file=sys.stderr)
    return 1 if num_failed else 0


def as_record(output: RequestOutput) -> dict[str, Any]:
    """An output as plain data for JSON."""
    prompt_logprobs = output.prompt_logprobs
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": prompt_logprobs
        and [None if entry is None else _logprobs(entry) for entry in prompt_logprobs],
        "num_cached_tokens": output.num_cached_tokens,
        "choices": [_choice(choice) for choice in output.outputs],
    }


def _choice(choice: CompletionOutput) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "error": choice.error,
        "seed": choice.seed,
        "cumulative_logprob": _finite(choice.cumulative_logprob),
        "logprobs": choice.logprobs and [_logprobs(entry) for entry in choice.logprobs],
        "metrics": choice.metrics and _metrics(choice.metrics),
    }


def _logprobs(entry: PositionLogprobs) -> dict[str, Any]:
    token, *top = (
        {
            "token_id": one.token_id,
            "token": one.decoded,
            "logprob": _finite(one.logprob),
            "rank": one.rank,
        }
        for one in (entry.token, *entry.top)
    )
    return token | {"top": top}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: the log probability of the impossible is null."""
    return value if value is not None and math.isfinite(value) else None


def _metrics(metrics: RequestMetrics) -> dict[str, Any]:
    times = metrics.token_times_s
    return {
        "queue_time_s": metrics.queue_time_s,
        "prefill_time_s": metrics.prefill_time_s,
        "time_to_first_token_s": metrics.time_to_first_token_s,
        "total_time_s": times[-1] - metrics.arrival_time_s if times else None,
        "num_cached_tokens": metrics.num_cached_tokens,
        "num_preemptions": metrics.num_preemptions,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
    }
