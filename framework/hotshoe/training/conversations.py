"""Conversations that a model holds with itself: what its draft heads learn from.

A drafter has to guess what the target would say, so the best text to learn from is the target's
own. The model's chat template opens a user's turn, the model continues it, and then answers what it
wrote (Magpie, Xu et al. 2024, arXiv:2406.08464). No file of prompts is needed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

from hotshoe.api import SamplingParams
from hotshoe.errors import TrainingError

if TYPE_CHECKING:
    from hotshoe import LLM, RequestOutput

SETTINGS_FILE = "settings.json"
ROUNDS_FILE = "conversations.jsonl"

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSettings:
    """How conversations are made. The same settings and model make the same ones, in rounds.

    Attributes:
        seed: of everything that is drawn.
        round_size: user turns that are opened at once; a round is written when it is complete.
        greedy_share: share of the conversations that are answered greedily.
        answer_temperature: of the others.
        second_turn_share: share of the conversations that get a second question.
        held_out_share: share of the conversations that is never trained on.
        max_user_tokens: longest user turn.
        max_answer_tokens: longest answer.
    """

    seed: int = 0
    round_size: int = 512
    greedy_share: float = 0.75
    answer_temperature: float = 0.7
    second_turn_share: float = 0.3
    held_out_share: float = 0.02
    max_user_tokens: int = 120
    max_answer_tokens: int = 256
    user_temperature: float = 1.0
    user_top_p: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One conversation as token ids.

    Attributes:
        token_ids: all of it, the template's tokens included.
        answers: start and end of every answer, the token that ends it included.
        is_greedy: whether the answers were decoded greedily.
        is_held_out: whether it is for measuring only; depends on the first user turn alone.
    """

    token_ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    is_greedy: bool
    is_held_out: bool


class ConversationFolder:
    """A folder of conversations, added to in rounds; every round is one line, so that a run that
    was cut short loses the round it was in and nothing else.

    Args:
        path: made if needed.
        identity: settings and model; a folder that was made with others is refused.

    Raises:
        TrainingError: if the folder holds conversations of another model or other settings.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        settle(path / SETTINGS_FILE, identity)
        self._drop_unfinished_line()

    def rounds(self) -> Iterator[list[Conversation]]:
        """What was written so far."""
        if not self._file.exists():
            return
        with self._file.open(encoding="utf-8") as lines:
            for line in lines:
                yield [_from_record(record) for record in json.loads(line)["conversations"]]

    def append(self, number: int, conversations: Sequence[Conversation]) -> None:
        """Write a round."""
        records = [asdict(one) for one in conversations]
        line = json.dumps({"round": number, "conversations": records}, separators=(",", ":"))
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @property
    def _file(self) -> Path:
        return self.path / ROUNDS_FILE

    def _drop_unfinished_line(self) -> None:
        if not self._file.exists():
            return
        with self._file.open("rb+") as file:
            file.truncate(_end_of_last_line(file))


def read_conversations(path: Path) -> list[Conversation]:
    """All conversations of a folder.

    Raises:
        TrainingError: if there are none.
    """
    settings = path / SETTINGS_FILE
    if not settings.exists():
        raise TrainingError(f"no conversations in {str(path)!r}; generate them first")
    folder = ConversationFolder(path, json.loads(settings.read_text("utf-8")))
    return [one for conversations in folder.rounds() for one in conversations]


def settle(file: Path, identity: Mapping[str, Any]) -> None:
    """Write down what a folder is made with, or compare it with what was written.

    Raises:
        TrainingError: if they differ, naming how.
    """
    wanted = json.loads(json.dumps(identity))
    if not file.exists():
        file.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        return
    found = json.loads(file.read_text("utf-8"))
    differing = [
        f"{key} {found.get(key)!r} there, {wanted.get(key)!r} now"
        for key in sorted({*found, *wanted})
        if found.get(key) != wanted.get(key)
    ]
    if differing:
        raise TrainingError(
            f"folder {str(file.parent)!r} was made with other settings: {'; '.join(differing)}; "
            "give the same ones, or another folder"
        )


def generate_conversations(
    llm: LLM,
    folder: ConversationFolder,
    settings: ConversationSettings,
    *,
    num_tokens: int,
    max_minutes: float | None = None,
    show_progress: bool = False,
) -> int:
    """Add rounds until the folder holds so many tokens, or the time is up.

    Returns:
        Number of tokens in the folder.

    Raises:
        TrainingError: if the model has nothing to say in a whole round.
        RequestError: if the model has no chat template.
    """
    writer = _Writer(llm, settings)
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    total, number = 0, 0
    for conversations in folder.rounds():
        writer.remember(conversations)
        total += _num_tokens(conversations)
        number += 1
    with tqdm(
        total=num_tokens, initial=total, desc="conversations", unit="tok", disable=not show_progress
    ) as bar:
        while total < num_tokens and (deadline is None or time.monotonic() < deadline):
            conversations = writer.round(number)
            folder.append(number, conversations)
            added = _num_tokens(conversations)
            bar.update(added)
            total += added
            number += 1
    return total


class _Writer:
    """Makes rounds; knows which user turns there were already."""

    def __init__(self, llm: LLM, settings: ConversationSettings) -> None:
        self._llm = llm
        self._settings = settings
        opening, self._end_of_turn = _user_turn(llm, [])
        self._turn_size = 2 * len(opening) + settings.max_user_tokens + settings.max_answer_tokens
        self._limit = llm.engine.limits.max_model_len
        if self._turn_size >= self._limit:
            raise TrainingError(
                f"a question and an answer may take {self._turn_size} tokens, but max_model_len is "
                f"{self._limit}; raise model.max_model_len, or have shorter answers"
            )
        self._known: set[str] = set()

    def remember(self, conversations: Sequence[Conversation]) -> None:
        """Take note of the user turns of a round that was written before."""
        for one in conversations:
            self._known.add(self._first_turn(one.token_ids[: one.answers[0][0]]))

    def round(self, number: int) -> list[Conversation]:
        settings = self._settings
        random = Random(f"{settings.seed}/{number}")
        turns = self._user_turns([[]] * settings.round_size, random)
        started = []
        for text in turns:
            messages = [{"role": "user", "content": text}]
            key = self._first_turn(self._llm.render_chat(messages)) if text else ""
            if text and key not in self._known:
                self._known.add(key)
                started.append((messages, key, random.random() < settings.greedy_share))
        if not started:
            raise TrainingError(
                f"none of {settings.round_size} user turns was usable: the model wrote nothing, or "
                "only what it had written before; is it a chat model?"
            )
        answered = self._answer([(messages, greedy) for messages, _, greedy in started], random)
        is_long = [
            output.outputs[0].finish_reason == "stop"
            and random.random() < settings.second_turn_share
            and _length(output) + self._turn_size < self._limit
            for output in answered
        ]
        longer = self._second_turns(
            [
                (messages, greedy, output)
                for (messages, _, greedy), output, chosen in zip(
                    started, answered, is_long, strict=True
                )
                if chosen
            ],
            random,
        )
        return [
            self._conversation(key, greedy, [output, *([next(longer)] if chosen else [])])
            for (_, key, greedy), output, chosen in zip(started, answered, is_long, strict=True)
        ]

    def _second_turns(
        self, chosen: Sequence[tuple[list[Message], bool, RequestOutput]], random: Random
    ) -> Iterator[RequestOutput | None]:
        """The answers to second questions; None where no question came."""
        so_far = [
            [*messages, {"role": "assistant", "content": output.text}]
            for messages, _, output in chosen
        ]
        asked = [
            ([*messages, {"role": "user", "content": text}], greedy) if text else None
            for messages, text, (_, greedy, _) in zip(
                so_far, self._user_turns(so_far, random), chosen, strict=True
            )
        ]
        answers = iter(self._answer([one for one in asked if one], random))
        return iter([next(answers) if one else None for one in asked])

    def _user_turns(self, so_far: Sequence[list[Message]], random: Random) -> list[str]:
        """What the user says next; empty if nothing, or if it has no end."""
        settings = self._settings
        prompts = [_user_turn(self._llm, messages)[0] for messages in so_far]
        outputs = self._generate(
            prompts,
            [
                SamplingParams(
                    temperature=settings.user_temperature,
                    top_p=settings.user_top_p,
                    max_tokens=settings.max_user_tokens,
                    stop_token_ids=(self._end_of_turn,),
                    seed=random.getrandbits(63),
                )
                for _ in prompts
            ],
        )
        return [
            one.text.strip() if one.outputs[0].finish_reason == "stop" else "" for one in outputs
        ]

    def _answer(
        self, conversations: Sequence[tuple[list[Message], bool]], random: Random
    ) -> list[RequestOutput]:
        settings = self._settings
        return self._generate(
            [self._llm.render_chat(messages) for messages, _ in conversations],
            [
                SamplingParams(
                    temperature=0.0 if is_greedy else settings.answer_temperature,
                    max_tokens=settings.max_answer_tokens,
                    seed=random.getrandbits(63),
                )
                for _, is_greedy in conversations
            ],
        )

    def _generate(
        self, prompts: list[list[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        return self._llm.generate(prompts, params) if prompts else []

    def _conversation(
        self, key: str, is_greedy: bool, outputs: Sequence[RequestOutput | None]
    ) -> Conversation:
        token_ids: list[int] = []
        answers: list[tuple[int, int]] = []
        for output in outputs:
            if output is None:
                continue
            prompt = output.prompt_token_ids
            if token_ids != prompt[: len(token_ids)]:
                answers = []  # the template changed what it repeats of the earlier answer
            token_ids = [*prompt, *output.outputs[0].token_ids]
            answers.append((len(prompt), len(token_ids)))
        return Conversation(
            token_ids=tuple(token_ids),
            answers=tuple(answers),
            is_greedy=is_greedy,
            is_held_out=_is_held_out(key, self._settings.held_out_share),
        )

    def _first_turn(self, prompt: Sequence[int]) -> str:
        """The first user turn of a conversation, whatever its capitals and spaces."""
        text = self._llm.tokenizer.decode(prompt, skip_special_tokens=True)
        return " ".join(text.casefold().split())


def _length(output: RequestOutput) -> int:
    return len(output.prompt_token_ids) + len(output.outputs[0].token_ids)


def _user_turn(llm: LLM, messages: Sequence[Message]) -> tuple[list[int], int]:
    """The tokens that open a user's turn after these messages, and the one that ends a turn."""
    # the template is asked twice: what differs is the user's
    one, other = (
        llm.render_chat([*messages, {"role": "user", "content": text}])
        for text in ("Hello", "Why not")
    )
    opening = _common_prefix(one, other)
    closing = _common_prefix(one[::-1], other[::-1])[::-1]
    return opening, closing[0]


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> list[int]:
    pairs = zip(one, other, strict=False)
    return [left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _is_held_out(key: str, share: float) -> bool:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


def _num_tokens(conversations: Sequence[Conversation]) -> int:
    return sum(len(one.token_ids) for one in conversations)


def _from_record(record: Mapping[str, Any]) -> Conversation:
    return Conversation(
        token_ids=tuple(record["token_ids"]),
        answers=tuple((start, end) for start, end in record["answers"]),
        is_greedy=record["is_greedy"],
        is_held_out=record["is_held_out"],
    )


def _end_of_last_line(file: IO[bytes]) -> int:
    """Where the last complete line ends."""
    return file.read().rfind(b"\n") + 1
