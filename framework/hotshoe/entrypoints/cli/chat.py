"""``hotshoe chat``: talk to the model in a terminal, or through pipes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from hotshoe.config.values import config_error
from hotshoe.entrypoints.cli.engine_arguments import CommandParser, parse_engine_arguments
from hotshoe.entrypoints.cli.sampling_arguments import add_sampling_arguments, given_sampling
from hotshoe.entrypoints.cli.server_arguments import (
    add_server_arguments,
    api_key,
    refuse_engine_settings,
)
from hotshoe.entrypoints.cli.session import (
    QUIET,
    Interrupted,
    start,
    stream,
    tolerate_any_bytes,
)
from hotshoe.errors import RequestError, UnavailableError

if TYPE_CHECKING:
    from hotshoe import LLM, SamplingParams

TEMPERATURE = 0.3

_WITHOUT = ("n", "logprobs", "prompt_logprobs", "detokenize")

_DESCRIPTION = f"""\
Talk to the model, line by line. The conversation is kept until /reset or the end.

Without a terminal, every line of standard input is a message, and only answers are printed.

With --url the model is that of a server, and what no sampling flag says is as the server has it.

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
    server = parser.add_argument_group("server")
    add_server_arguments(server, url=None, help="talk to the model of a server, and run none here")
    server.add_argument(
        "--server-model", metavar="NAME", help="with --url (default: the first that it lists)"
    )
    add_sampling_arguments(
        parser,
        without=_WITHOUT,
        max_tokens="up to max_model_len",
        temperature=f"the model's own, else {TEMPERATURE}",
    )
    resolved, arguments = parse_engine_arguments(parser, argv)
    given = given_sampling(arguments)
    if arguments.url is not None:
        refuse_engine_settings(resolved)
        from hotshoe.entrypoints.cli.server_chat import ServerModel

        with ServerModel(arguments.url, api_key(arguments), arguments.server_model, given) as model:
            _hold(Conversation(model, arguments.system), arguments.once)
        return 0
    if arguments.server_model is not None:
        raise config_error(["--server-model: names a model of a server; add --url, or use --model"])
    with start(resolved) as llm:
        if not {"temperature", "do_sample"} & set(llm.generation_config):
            given.setdefault("temperature", TEMPERATURE)
        params = llm.default_sampling_params(**{"max_tokens": None} | given)
        _hold(Conversation(OwnModel(llm, params), arguments.system), arguments.once)
    return 0


def _hold(conversation: Conversation, once: str | None) -> None:
    if once is not None:
        conversation.ask(once)
    elif sys.stdin.isatty():
        _talk(conversation)
    else:
        _answer_lines(conversation)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What a model said.

    Attributes:
        cut_off: why it says no more, if it was not at its end; None otherwise.
    """

    text: str
    cut_off: str | None = None


class ChatModel(Protocol):
    """Continues a conversation; runs in this process, or on a server."""

    def answer(self, messages: Sequence[Mapping[str, str]]) -> ChatAnswer:
        """Print the answer as it comes.

        Raises:
            RequestError: if there is none to these messages.
            Interrupted: on Ctrl-C, with what had come.
        """
        ...


class Conversation:
    """Messages so far, and the model that continues them."""

    def __init__(self, model: ChatModel, system: str | None = None) -> None:
        self._model = model
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
        try:
            answer = self._model.answer(messages)
        except Interrupted as interrupted:
            if interrupted.text:
                self._remember(messages, interrupted.text)
            raise
        self._remember(messages, answer.text)
        if answer.cut_off is not None:
            _note(f"the answer was cut off: {answer.cut_off}")

    def _remember(self, messages: list[dict[str, str]], answer: str) -> None:
        self._messages = [*messages, {"role": "assistant", "content": answer}]


class OwnModel:
    """A model that runs in this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params

    def answer(self, messages: Sequence[Mapping[str, str]]) -> ChatAnswer:
        """Print the answer as it comes."""
        prompt = self._llm.render_chat(messages)
        limit = self._llm.engine.limits.max_model_len
        room = limit - len(prompt)
        if room <= 0:
            raise RequestError(
                f"the conversation has {len(prompt)} tokens with this message but max_model_len is "
                f"{limit}; /reset starts a new one, --max-model-len may raise the limit"
            )
        output = stream(self._llm, prompt, self._fitting(room))
        if output.outputs[0].finish_reason != "length":
            return ChatAnswer(output.text)
        is_full = len(output.outputs[0].token_ids) >= room
        full = f"max_model_len is {limit}; /reset starts a new conversation"
        return ChatAnswer(output.text, full if is_full else "max_tokens was reached")

    def _fitting(self, room: int) -> SamplingParams:
        """``max_tokens`` is a limit per answer; near the end of the context, the context is."""
        wanted = self._params.max_tokens
        changes: dict[str, Any] = {"max_tokens": room if wanted is None else min(wanted, room)}
        changes["min_tokens"] = min(self._params.min_tokens, changes["max_tokens"])
        return msgspec.structs.replace(self._params, **changes)


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
        except (RequestError, UnavailableError) as error:
            _note(str(error))
    return True


def _note(text: str) -> None:
    """Say something that is not the model's."""
    print(f"[{text}]", file=sys.stderr, flush=True)
