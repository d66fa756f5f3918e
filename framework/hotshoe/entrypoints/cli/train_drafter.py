"""``hotshoe train-drafter``: a draft head for a model, from conversations that it writes itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hotshoe.entrypoints.cli.engine_arguments import (
    CommandParser,
    parse_engine_arguments,
    quieten,
)
from hotshoe.entrypoints.cli.session import QUIET

if TYPE_CHECKING:
    from hotshoe.training.pipeline import DataSettings
    from hotshoe.training.trainer import TrainingSettings

_DEFAULT_MINUTES = 30.0

_DESCRIPTION = f"""\
Train a small network that drafts tokens for speculative decoding of a model.

eagle   one decoder layer that drafts token by token (EAGLE-3): more drafts are accepted
medusa  a block for each position ahead, which draft in one pass: quick to train and to run

Three stages, each of which goes on where an earlier run in the same folder stopped:
  1. the model holds conversations with itself, through its chat template (FOLDER/conversations);
     a share of them is held out for measuring
  2. its hidden states over them are computed (FOLDER/features, about 2 KiB per token and 256
     dimensions of the model)
  3. the head is trained and measured (FOLDER/eagle or FOLDER/medusa, a draft checkpoint)

Give the model and all else about the engine with the flags below; --seed is the seed of everything.
With --max-steps and without --minutes or --data-minutes, two runs on as many threads
(OMP_NUM_THREADS) give the same head.

{QUIET}"""


def run(argv: list[str]) -> int:
    """Train, and print how the head does on conversations that it has not seen."""
    resolved, arguments = parse_engine_arguments(_parser(), argv)
    quieten(resolved)
    from hotshoe.training.pipeline import train_drafter

    report = train_drafter(
        arguments.kind,
        resolved,
        Path(arguments.folder),
        _data_settings(arguments, resolved.config.seed),
        _training_settings(arguments, resolved.config.seed),
        show_progress=sys.stderr.isatty(),
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    losses = " ".join(f"{loss:.3f}" for loss in report.losses)
    print(f"{report.step} steps, {report.num_tokens} tokens, {report.minutes:.1f} minutes")
    print(f"loss per position: {losses}")
    print(f"held-out conversations, greedy: {report.acceptance}")
    print(f"the draft checkpoint is {str(Path(arguments.folder) / arguments.kind)!r}")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("hotshoe train-drafter", _DESCRIPTION)
    parser.add_argument("kind", choices=["eagle", "medusa"], help="what to train")
    parser.add_argument("folder", metavar="FOLDER", help="for data and checkpoints; made if needed")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--num-tokens",
        type=_at_least(int, 1),
        metavar="N",
        help="tokens of conversations (default: 2000000)",
    )
    data.add_argument(
        "--data-minutes",
        type=_at_least(float, 0),
        metavar="M",
        help="generate no longer than this, to the end of a round",
    )
    data.add_argument(
        "--round-size",
        type=_at_least(int, 1),
        metavar="N",
        help="conversations that are begun at once and written together (default: 512)",
    )
    data.add_argument(
        "--max-answer-tokens", type=_at_least(int, 1), metavar="N", help="(default: 256)"
    )
    data.add_argument(
        "--held-out-share",
        type=_share,
        metavar="X",
        help="share of the conversations to measure on (default: 0.02)",
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--minutes",
        type=_at_least(float, 0),
        metavar="M",
        help=f"train for so long (default: {_DEFAULT_MINUTES:g} without --max-steps)",
    )
    training.add_argument(
        "--max-steps", type=_at_least(int, 1), metavar="N", help="train for so many steps"
    )
    training.add_argument(
        "--num-draft-steps",
        type=_at_least(int, 1),
        metavar="N",
        help="tokens ahead that the loss looks at (default: 3 for eagle); number of medusa heads "
        "(default: 4)",
    )
    training.add_argument(
        "--draft-vocab-size",
        type=_at_least(int, 1),
        metavar="N",
        help="tokens that can be drafted, the most frequent ones (default: 8192)",
    )
    training.add_argument(
        "--learning-rate", type=_at_least(float, 0), metavar="X", help="(default: 0.008)"
    )
    training.add_argument(
        "--measure-every",
        type=_at_least(int, 1),
        metavar="N",
        help="steps between measurements, with a checkpoint each (default: 200)",
    )
    return parser


def _data_settings(arguments: argparse.Namespace, seed: int) -> DataSettings:
    from hotshoe.training.conversations import ConversationSettings
    from hotshoe.training.pipeline import DataSettings

    given = {
        name: getattr(arguments, name)
        for name in ("round_size", "max_answer_tokens", "held_out_share")
        if getattr(arguments, name) is not None
    }
    amount = {} if arguments.num_tokens is None else {"num_tokens": arguments.num_tokens}
    return DataSettings(
        max_minutes=arguments.data_minutes,
        conversations=ConversationSettings(seed=seed, **given),
        **amount,
    )


def _training_settings(arguments: argparse.Namespace, seed: int) -> TrainingSettings:
    from hotshoe.training.pipeline import TRAINING_DEFAULTS
    from hotshoe.training.trainer import TrainingSettings

    names = ("num_draft_steps", "draft_vocab_size", "learning_rate", "measure_every")
    given = {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }
    minutes = arguments.minutes
    if minutes is None and arguments.max_steps is None:
        minutes = _DEFAULT_MINUTES
    given |= {"seed": seed, "minutes": minutes, "max_steps": arguments.max_steps}
    return TrainingSettings(**{**TRAINING_DEFAULTS[arguments.kind], **given})


def _at_least(kind: type[int] | type[float], least: int) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = kind(least) - 1
        if not number >= least or (kind is float and number == least):
            bound = f"{least} or more" if kind is int else f"more than {least}"
            raise argparse.ArgumentTypeError(f"got {text!r}, allowed: {bound}")
        return number

    return read


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: more than 0, less than 1")
    return share
