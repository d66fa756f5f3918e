"""The training loop: batches to gradients on every thread, steps, measurements, checkpoints.

A step takes its gradient from several batches. Each is computed by one thread, and the sums are
taken in the order of the batches: the result depends on the seed and not on what else the machine
does.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hotshoe.errors import TrainingError
from hotshoe.training.acceptance import Acceptance, measure_acceptance
from hotshoe.training.batches import cut_windows, endless_order, make_batch
from hotshoe.training.checkpoint import write_checkpoint
from hotshoe.training.columns import ColumnSampler
from hotshoe.training.features import Example
from hotshoe.training.heads import DraftHead, choose_draft_vocab, count_use
from hotshoe.training.losses import soft_target_loss
from hotshoe.training.muon import Muon
from hotshoe.training.target import Target

STATE_FILE = "training.pt"
_WARM_UP_STEPS = 30
_MEASURED_TOKENS = 200_000
"""Held-out tokens that acceptance is measured on while training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How a head is trained.

    Attributes:
        seed: of weights and of the order of the examples.
        max_steps: steps until the end; None = as many as fit in ``minutes``.
        minutes: time until the end; None = until ``max_steps``. One of the two is given. With
            steps alone, two runs are equal.
        num_draft_steps: tokens ahead that the loss looks at.
        step_decay: weight of each draft step relative to the one before.
        sharpness: factor of the target's logits in the loss.
        learning_rate: its peak; it rises for a few steps, then falls along a cosine.
        weight_decay: of matrices.
        batches_per_step: batches whose gradients make one step.
        batch_tokens: padded tokens of one batch.
        window: answer tokens of a conversation that are in one batch; None = all. Few of many
            conversations teach a head more than many of few, if it needs no more than
            ``num_draft_steps`` of context.
        draft_vocab_size: tokens that can be drafted.
        num_columns: of these, how many the loss of a batch looks at; None = all.
        measure_every: steps between measurements, at which a checkpoint is written too.
        measured_drafts: drafts per round of the measurements.
    """

    seed: int = 0
    max_steps: int | None = None
    minutes: float | None = None
    num_draft_steps: int = 3
    step_decay: float = 0.8
    sharpness: float = 1.0
    learning_rate: float = 8e-3
    weight_decay: float = 0.1
    batches_per_step: int = 2
    batch_tokens: int = 768
    window: int | None = None
    draft_vocab_size: int = 8192
    num_columns: int | None = None
    measure_every: int = 200
    measured_drafts: int = 4

    def __post_init__(self) -> None:
        if self.max_steps is None and self.minutes is None:
            raise TrainingError("training needs an end: give max_steps, minutes or both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a run stands.

    Attributes:
        step: steps taken.
        num_tokens: tokens seen, those of repeated epochs included.
        minutes: time spent training, measurements left out, all sittings together.
        losses: per draft step, mean cross entropy per answer token of late.
        acceptance: on held-out conversations.
    """

    step: int
    num_tokens: int
    minutes: float
    losses: tuple[float, ...]
    acceptance: Acceptance


class Trainer:
    """Trains one head in one folder; goes on where an earlier run in it stopped.

    Args:
        head: its weights are set here.
        target: of which the head shares embedding and head.
        examples: held-out ones are for measuring only.
        folder: for the checkpoint and the state of the training; made if needed.
        settings: how.
        dtype: of activations.

    Attributes:
        draft_vocab: ``[draft_vocab_size]`` target ids.

    Raises:
        TrainingError: if there is nothing to train or to measure on, or the folder's training was
            begun with other settings.
    """

    def __init__(
        self,
        head: DraftHead,
        target: Target,
        examples: Sequence[Example],
        folder: Path,
        settings: TrainingSettings,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        first = max(settings.num_draft_steps, settings.measured_drafts) + 1
        usable = [one for one in examples if bool(one.is_answer[first:].any())]
        training = [one for one in usable if not one.is_held_out]
        self._held_out = _measured([one for one in usable if one.is_held_out and one.is_greedy])
        if not training or not self._held_out:
            raise TrainingError(
                f"{len(training)} conversations to train on and {len(self._held_out)} greedy "
                "ones held out to measure on; generate more, or hold out a larger share"
            )
        self.folder = folder
        self.settings = settings
        self._target = target
        self._windows = cut_windows(
            training, settings.window, num_context=settings.num_draft_steps + 1
        )
        use = count_use(training, target.vocab_size)
        self.draft_vocab = choose_draft_vocab(use, settings.draft_vocab_size)
        self._head_rows = target.head[self.draft_vocab].to(dtype)
        self._columns: ColumnSampler | None = None
        if settings.num_columns is not None and settings.num_columns < len(self.draft_vocab):
            self._columns = ColumnSampler(self.draft_vocab, use, settings.num_columns)
        self._embedding = target.embedding.to(dtype)
        head.start_from(target, settings.seed)
        self.head = head
        # what the threads compute with; the weights themselves stay float32
        self._working = copy.deepcopy(head).to(dtype)
        self._optimizers = _optimizers(head, settings)
        self._step, self._num_tokens, self._seconds = 0, 0, 0.0
        self._losses = torch.zeros(settings.num_draft_steps)
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def run(self, *, show_progress: bool = False) -> Report:
        """Train to the end of the budget."""
        lengths = [len(one) for one in self._windows]
        order = endless_order(lengths, self.settings.batch_tokens, seed=self.settings.seed)
        per_step = self.settings.batches_per_step
        next(islice(order, self._step * per_step, self._step * per_step), None)
        report: Report | None = None
        with (
            single_threaded_operations() as num_threads,
            ThreadPoolExecutor(
                num_threads, initializer=torch.set_num_threads, initargs=(1,)
            ) as pool,
            tqdm(
                total=self.settings.max_steps,
                initial=self._step,
                desc="training",
                unit="step",
                disable=not show_progress,
            ) as bar,
        ):
            while self._progress < 1:
                started = time.monotonic()
                self._take_step(list(islice(order, per_step)), pool)
                self._seconds += time.monotonic() - started
                bar.update(1)
                bar.set_postfix(loss=f"{self._losses[0]:.3f}", minutes=f"{self._seconds / 60:.1f}")
                report = None
                if self._step % self.settings.measure_every == 0:
                    report = self._report()
                    bar.write(f"step {report.step}: {report.acceptance}")
            return report or self._report()

    @property
    def _progress(self) -> float:
        """Share of the budget that is used up."""
        settings = self.settings
        steps = 0.0 if settings.max_steps is None else self._step / settings.max_steps
        time_share = 0.0 if settings.minutes is None else self._seconds / (60 * settings.minutes)
        return max(steps, time_share)

    def _take_step(self, batches: Sequence[Sequence[int]], pool: ThreadPoolExecutor) -> None:
        _copy_parameters(self.head, self._working)
        first = self._step * len(batches)
        results = list(pool.map(self._gradients, batches, range(first, first + len(batches))))
        num_rows = sum(one.num_rows for one in results)
        for index, parameter in enumerate(self.head.parameters()):
            gradient = torch.zeros_like(parameter)
            for one in results:
                gradient += one.gradients[index]
            parameter.grad = gradient / max(num_rows, 1)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        scale = _schedule(self._step, self._progress)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * scale
            if isinstance(optimizer, Muon):
                optimizer.run_all = pool.map
            optimizer.step()
        losses = sum((one.losses for one in results), torch.zeros(1)) / max(num_rows, 1)
        self._losses = losses if self._step == 0 else 0.95 * self._losses + 0.05 * losses
        self._num_tokens += sum(one.num_tokens for one in results)
        self._step += 1

    def _gradients(self, indices: Sequence[int], number: int) -> _BatchResult:
        settings = self.settings
        windows = [self._windows[index] for index in indices]
        batch = make_batch([one.cut() for one in windows], settings.num_draft_steps + 1)
        weights = [settings.step_decay**step for step in range(settings.num_draft_steps)]
        outputs = self._working.unroll(batch, self._embedding, settings.num_draft_steps)
        head_rows, offsets = self._head_rows, None
        if self._columns is not None:
            seed = settings.seed * 1_000_003 + number
            columns, offsets = self._columns.draw(batch.token_ids[batch.rows], seed)
            head_rows = head_rows[columns]
        loss, losses = soft_target_loss(
            outputs,
            batch.targets.to(head_rows.dtype),
            head_rows,
            weights=[weight / sum(weights) for weight in weights],
            sharpness=settings.sharpness,
            offsets=offsets,
        )
        return _BatchResult(
            gradients=torch.autograd.grad(loss, list(self._working.parameters())),
            losses=losses,
            num_rows=len(batch.rows[0]),
            num_tokens=sum(len(one) - one.num_context for one in windows),
        )

    def _report(self) -> Report:
        """Measure, and write what there is."""
        _copy_parameters(self.head, self._working)
        acceptance = measure_acceptance(
            lambda batch, num_steps: self._working.unroll(batch, self._embedding, num_steps),
            self._head_rows,
            self.draft_vocab,
            self._held_out,
            num_steps=self.settings.measured_drafts,
            max_tokens=self.settings.batch_tokens,
        )
        report = Report(
            step=self._step,
            num_tokens=self._num_tokens,
            minutes=self._seconds / 60,
            losses=tuple(self._losses.tolist()),
            acceptance=acceptance,
        )
        write_checkpoint(self.folder, self.head, self._target, self.draft_vocab, report=report)
        self._save_state()
        return report

    # -- stopping and going on --------------------------------------------------------------------

    def _save_state(self) -> None:
        state = {
            "settings": _comparable(self.settings),
            "step": self._step,
            "num_tokens": self._num_tokens,
            "seconds": self._seconds,
            "losses": self._losses,
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        part = self.folder / f"{STATE_FILE}.part"
        torch.save(state, part)
        part.replace(self.folder / STATE_FILE)

    def _resume(self) -> None:
        file = self.folder / STATE_FILE
        if not file.exists():
            return
        state = torch.load(file, weights_only=True)
        begun, now = state["settings"], _comparable(self.settings)
        differing = [
            f"{key} {begun.get(key)!r} there, {now[key]!r} now"
            for key in now
            if begun.get(key) != now[key]
        ]
        if differing:
            raise TrainingError(
                f"the training in {str(self.folder)!r} was begun with other settings: "
                f"{'; '.join(differing)}; give the same ones, or remove that folder"
            )
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._step, self._num_tokens = state["step"], state["num_tokens"]
        self._seconds, self._losses = state["seconds"], state["losses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchResult:
    """Sums over the answer tokens of one batch."""

    gradients: Sequence[Tensor]
    losses: Tensor
    num_rows: int
    num_tokens: int


@contextmanager
def single_threaded_operations() -> Iterator[int]:
    """Run every operation on the thread that calls it; yields how many threads there could be."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def _optimizers(head: DraftHead, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """Muon for matrices, Adam for the rest."""
    matrices = [one for one in head.parameters() if one.ndim == 2]
    vectors = [one for one in head.parameters() if one.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(
            matrices,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
        ),
        torch.optim.AdamW(
            vectors, lr=settings.learning_rate / 4, betas=(0.9, 0.95), weight_decay=0.0
        ),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _schedule(step: int, progress: float) -> float:
    """Factor of the learning rate."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * progress))


def _measured(held_out: Sequence[Example]) -> list[Example]:
    """As many as are worth the time, the first ones."""
    chosen, total = [], 0
    for one in held_out:
        if total >= _MEASURED_TOKENS:
            break
        chosen.append(one)
        total += len(one)
    return chosen


@torch.no_grad()
def _copy_parameters(source: DraftHead, destination: DraftHead) -> None:
    for one, other in zip(source.parameters(), destination.parameters(), strict=True):
        other.copy_(one)


def _comparable(settings: TrainingSettings) -> dict[str, Any]:
    """What must stay the same from one sitting to the next."""
    return {name: value for name, value in asdict(settings).items() if name != "measure_every"}
