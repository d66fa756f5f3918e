"""``hotshoe demo``: one question to the model, and which parts answered it."""

from __future__ import annotations

import time

from hotshoe.entrypoints.cli.engine_arguments import CommandParser, parse_engine_arguments
from hotshoe.entrypoints.cli.session import QUIET, start, stream

QUESTION = "What is photosynthesis? Answer in one sentence."

_MAX_TOKENS = 128

_DESCRIPTION = f"""\
Ask the model a question, greedily, and show which plugins answered it and how fast.

{QUIET}"""


def run(argv: list[str]) -> int:
    """Load, ask, show."""
    parser = CommandParser("hotshoe demo", _DESCRIPTION)
    parser.add_argument(
        "question", nargs="?", default=QUESTION, help=f"what to ask (default: {QUESTION!r})"
    )
    resolved, arguments = parse_engine_arguments(parser, argv)
    started = time.perf_counter()
    with start(resolved) as llm:
        load_s = time.perf_counter() - started
        print(f"> {arguments.question}")
        prompt = llm.render_chat([{"role": "user", "content": arguments.question}])
        limit = llm.engine.limits.max_model_len - len(prompt)
        params = llm.default_sampling_params(
            temperature=0.0, max_tokens=max(1, min(_MAX_TOKENS, limit))
        )
        choice = stream(llm, prompt, params).outputs[0]
        width = max(map(len, llm.components))
        print("\nassembled from")
        for place, plugin in llm.components.items():
            print(f"  {place:<{width}}  {plugin}")
    assert choice.metrics is not None
    first_s = choice.metrics.time_to_first_token_s or 0.0
    gaps = choice.metrics.inter_token_times_s
    rate = f"{len(gaps) / sum(gaps):.1f} tokens/s" if gaps else "no second token"
    print(
        f"\nmodel {resolved.config.model.path} loaded in {load_s:.1f} s; first token after "
        f"{first_s * 1e3:.0f} ms ({len(prompt)} prompt tokens), then {rate}"
    )
    return 0
