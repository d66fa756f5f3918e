"""``hotshoe chat``: talk to the model in a terminal, or through pipes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from hotshoe.entrypoints.cli.engine_arguments import CommandParser, parse_engine_arguments
from hotshoe.entrypoints.cli.sampling_arguments import add_sampling_arguments, given_sampling
from hotshoe.entrypoints.cli.session import (
    QUIET,
    Interrupted,
    start,
    stream,
    tolerate_any_bytes,
)
from hotshoe.errors import RequestError

if TYPE_CHECKING:
    from hotshoe import LLM, SamplingParams

TEMPERATURE = 0.3

_WITHOUT = ("n", "logprobs", "prompt_logprobs", "detokenize")

_DESCRIPTION = f"""\
Talk to the model, line by line. The conversation is kept until /reset or the end.

Without a terminal, every line of standard input is a message, and only answers are printed.

{QUIET}"""

_HELP = """\
/reset  forget the conversation
/help   show this
/exit   leave, as does Ctrl-D
Ctrl-C  interrupt the answer"""


def run(argv: list[str]) -> int:
    """Hold the conversation."""
    parser = CommandParser("hotshoe chat", _DESCRIPTION)
    parser.add_argument("--once", metavar="TEXT", help="answer this message and exit")
    parser.add_argument("--system", metavar="TEXT", help="system message before the conversation")
    add_sampling_arguments(
        parser,
        without=_WITHOUT,
        max_tokens="up to max_model_len",
        temperature=f"the model's own, else {TEMPERATURE}",
    )
    resolved, arguments = parse_engine_arguments(parser, argv)
    given = {"max_tokens": None} | given_sampling(arguments)
    with start(resolved) as llm:
        if not {"temperature", "do_sample"} & set(llm.generation_config):
            given.setdefault("temperature", TEMPERATURE)
        conversation = Conversation(llm, llm.default_sampling_params(**given), arguments.system)
        if arguments.once is not None:
            conversation.ask(arguments.once)
        elif sys.stdin.isatty():
            _talk(conversation)
        else:
            _answer_lines(conversation)
    return 0


class Conversation:
    """Messages so far, and the model that continues them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)

    def reset(self) -> None:
        """Forget all but the system message."""
        self._messages = list(self._start)

    def ask(self, text: str) -> None:
        """Print the answer to a message as it comes, and remember both.

        Raises:
            RequestError: if the message can't be answered; it is not remembered.
            Interrupted: on Ctrl-C; what had come of the answer is remembered.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = self._llm.render_chat(messages)
        limit = self._llm.engine.limits.max_model_len
        room = limit - len(prompt)
        if room <= 0:
            raise RequestError(
                f"the conversation has {len(prompt)} tokens with this message but max_model_len is "
                f"{limit}; /reset starts a new one, --max-model-len may raise the limit"
            )
        try:
            output = stream(self._llm, prompt, self._fitting(room))
        except Interrupted as interrupted:
            if interrupted.text:
                self._remember(messages, interrupted.text)
            raise
        self._remember(messages, output.text)
        if output.outputs[0].finish_reason == "length":
            is_full = len(output.outputs[0].token_ids) >= room
            why = f"max_model_len is {limit}; /reset" if is_full else "max_tokens was reached"
            _note(f"the answer was cut off: {why}{' starts a new conversation' * is_full}")

    def _fitting(self, room: int) -> SamplingParams:
        """``max_tokens`` is a limit per answer; near the end of the context, the context is."""
        wanted = self._params.max_tokens
        changes: dict[str, Any] = {"max_tokens": room if wanted is None else min(wanted, room)}
        changes["min_tokens"] = min(self._params.min_tokens, changes["max_tokens"])
        return msgspec.structs.replace(self._params, **changes)

    def _remember(self, messages: list[dict[str, str]], answer: str) -> None:
        self._messages = [*messages, {"role": "assistant", "content": answer}]


def _talk(conversation: Conversation) -> None:
    import readline  # input() then edits lines and keeps a history

    readline.set_auto_history(True)
    print("Ask something; /help lists the commands.")
    while True:
        try:
            line = input("> ")
            if not _obey(conversation, line):
                return
        except EOFError:
            print()
            return
        except Interrupted:
            _note("interrupted")
        except KeyboardInterrupt:
            print()
            _note("/exit or Ctrl-D leaves")


def _answer_lines(conversation: Conversation) -> None:
    tolerate_any_bytes()
    for line in sys.stdin:
        if not _obey(conversation, line):
            return


def _obey(conversation: Conversation, line: str) -> bool:
    """Run a command or answer a message; False if the conversation is over."""
    text = line.strip()
    if text == "/exit":
        return False
    if text == "/reset":
        conversation.reset()
        _note("a new conversation")
    elif text == "/help":
        print(_HELP)
    elif text.startswith("/") and " " not in text:
        _note(f"unknown command {text!r}; /help lists them")
    elif text:
        try:
            conversation.ask(text)
        except RequestError as error:
            _note(str(error))
    return True


def _note(text: str) -> None:
    """Say something that is not the model's."""
    print(f"[{text}]", file=sys.stderr, flush=True)
