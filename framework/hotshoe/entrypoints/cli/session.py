"""What the commands that run a model in their own process share: start it, stream an answer."""

from __future__ import annotations

import io
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from hotshoe.config import ResolvedConfig
from hotshoe.entrypoints.cli.engine_arguments import quieten

if TYPE_CHECKING:
    from hotshoe import LLM, RequestOutput, SamplingParams
    from hotshoe.entrypoints.llm import Prompt

QUIET = "The log shows warnings and errors only, unless log_level is set."


def start(resolved: ResolvedConfig) -> LLM:
    """Load the model and build the engine. Imports torch, so call it when all else is checked."""
    quieten(resolved)
    if sys.stderr.isatty():
        print(f"loading {resolved.config.model.path} ...", file=sys.stderr, flush=True)
    from hotshoe import LLM

    return LLM.from_config(resolved)


def tolerate_any_bytes() -> None:
    """Read standard input whatever its bytes, as arguments are read: what is no UTF-8 then fails
    where it is tokenized, with an error that says where it stands.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")


def stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Print a completion as it comes; returns it when finished.

    Raises:
        Interrupted: on Ctrl-C, with what had come; the engine is free again.
        RequestError: if it can't be served, or failed.
    """
    output: RequestOutput | None = None
    try:
        with closing(llm.stream(prompt, params)) as outputs:
            for output in outputs:
                print(output.outputs[0].new_text, end="", flush=True)
    except KeyboardInterrupt:
        raise Interrupted(output.text if output else "") from None
    finally:
        print(flush=True)
    assert output is not None
    return output


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while an answer was coming.

    Attributes:
        text: what was printed of it.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
