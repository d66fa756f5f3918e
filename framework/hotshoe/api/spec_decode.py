"""Speculative-decoding contract: propose draft tokens; the core verifies them and keeps those that
the target would draw, or those that ``spec_decode.acceptance`` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hotshoe.errors import PluginContractError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from hotshoe.api.kernels import Kernels
    from hotshoe.api.layers import ForwardStep, LayerFactory
    from hotshoe.api.model import Model
    from hotshoe.api.quantization import CheckpointTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What a proposer needs from the core, as data.

    Attributes:
        hidden_state_layers: layers of the target whose output it reads: ``i`` is the residual
            stream after layer i, -1 what the final norm makes of the last one.
        num_lookahead_slots: KV slots past the target's own tokens that its layers write to.
        needs_finished_requests: whether it must hear which requests have ended.
        needs_every_step: whether it must hear of steps after which nobody is to have drafts.
        reads_next_token: whether what it caches for a position depends on the following token, so
            that this token joins the hash of the block.
    """

    hidden_state_layers: tuple[int, ...] = ()
    num_lookahead_slots: int = 0
    needs_finished_requests: bool = False
    needs_every_step: bool = True
    reads_next_token: bool = False


class DraftDraws(ABC):
    """Draws drafts with the randomness that the target's tokens will be drawn with, so that equal
    distributions draw equal tokens ("drafter-invariant" decoding, arXiv:2408.07978).

    Where tokens are sampled, such drafts are kept more often than the most likely tokens. And the
    core knows what they were drawn from, which rejection sampling takes. So a draft that was drawn
    is returned as it is, and whether one is mustn't depend on which token it is or on those behind
    it. Drafts that weren't drawn count as found without chance.
    """

    @abstractmethod
    def draw(
        self,
        logits: Tensor,
        requests: Sequence[int],
        num_drafts_before: Sequence[int],
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """Draw one draft per row, by the sampling parameters of its request.

        Args:
            logits: ``[R, W]`` of the drafter, any float type; may be overwritten.
            requests: per row, index of its request in ``ProposeInput``.
            num_drafts_before: per row, how many drafts of its request precede the one drawn.
            token_ids: ``[W]`` int64, what the columns stand for in the target's vocabulary; None =
                the token of the same number.

        Returns:
            ``[R]`` int64 token ids of the target; for greedy requests the most likely ones.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeInput:
    """All requests of the step that just ran, one entry each.

    Attributes:
        request_ids: stable identity, to key a drafter's own state on. The tokens of a request only
            grow.
        token_ids: per request its committed tokens so far, prompt and output, as a read-only
            ``[num_tokens]`` int32 view that is valid during the call only.
        num_computed_tokens: per request, how many of them the target has in its KV cache: one less
            than there are once the prompt is computed. Of the tokens of this step the last
            ``num_drafted - num_accepted`` are not among them: those were refused.
        max_draft_tokens: per request, the most that can be used next: 0 while its prompt is
            still being computed, near its length limit, or where drafts don't pay.
        num_accepted: per request, how many drafts of the last round were kept; ``num_drafted``
            is how many were verified.
        hidden_states: by layer as in ``Requirements.hidden_state_layers``, ``[num_tokens,
            hidden_size]`` over all tokens of the step, packed as ``query_start_loc`` (``[num_reqs +
            1]``) says. They may be kept: nothing writes to them later.
        draws: draws drafts from the drafter's logits; None if the most likely tokens are wanted,
            as where all requests are greedy.
        is_dormant: per request, whether drafts don't pay for it, so that none are likely to be
            asked for soon; empty = none is. A drafter may put off all work for it, even when a
            block is full: others that share it will draft badly, which costs less.
    """

    request_ids: Sequence[str]
    token_ids: Sequence[np.ndarray]
    num_computed_tokens: Sequence[int]
    max_draft_tokens: Sequence[int]
    num_drafted: Sequence[int]
    num_accepted: Sequence[int]
    query_start_loc: Sequence[int]
    hidden_states: Mapping[int, Tensor]
    draws: DraftDraws | None = None
    is_dormant: Sequence[bool] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTokens:
    """Drafts per request, in the order of the input; an empty list means to go without.

    Attributes:
        token_ids: chains of token ids, or the nodes of a tree in depth-first order.
        parents: per request, each node's parent index within its list, -1 for children of the
            last committed token; None = chains.
    """

    token_ids: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpans:
    """Runs of positions that a drafter's layers compute in one pass, one run per request.

    Attributes:
        requests: indices of the requests in ``ProposeInput``.
        first_positions: of each run. A pass attends to what earlier passes and steps have written
            for positions before.
        num_tokens: in each run, at least 1.
        num_wanted: of each run, so many last tokens whose final hidden states are looked at; None =
            all. ``DraftPass.step.wanted_rows`` names them, or may still be None.
    """

    requests: Sequence[int]
    first_positions: Sequence[int]
    num_tokens: Sequence[int]
    num_wanted: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class DraftPass:
    """What the layers of one pass take besides their inputs.

    Attributes:
        positions: ``[num_tokens]`` int64, packed over requests.
        step: attention metadata and the drafter's caches.
    """

    positions: Tensor
    step: ForwardStep


DraftFunction = Callable[..., "tuple[Tensor, ...]"]
"""``function(passes, *tensors)``, with a ``DraftPass`` for each ``DraftSpans``."""


class DraftForwards(ABC):
    """Runs a drafter's own layers, which share the target's block ids: what they cache for a token
    lies in the slot that the target has for it.
    """

    @abstractmethod
    def run(
        self, function: DraftFunction, spans: Sequence[DraftSpans], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Call ``function(passes, *tensors)`` during ``propose``, or replay what it did before.

        Where the kernels can, small passes are recorded by the function, the shapes of the tensors
        and the sizes of the spans, and run again without Python (``Kernels.record``, which says
        what a function may do). So a function must be the same object from call to call, such as
        one kept in an attribute, and its results a function of the arguments' values alone.

        Args:
            function: what to run.
            spans: one entry for each pass that it makes, in order.
            tensors: its further inputs.

        Returns:
            What it returned. Later calls may overwrite these tensors.
        """


class DraftCheckpoint(Protocol):
    """An opened checkpoint, to be closed by leaving its ``with`` block."""

    @property
    def name(self) -> str:
        """What the user called it."""

    @property
    def format(self) -> str:
        """``safetensors``, ``gguf`` or ``pytorch``."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Its ``config.json``."""

    def tensors(self) -> Iterable[CheckpointTensor]:
        """Every tensor, none of them read yet."""

    def __enter__(self) -> DraftCheckpoint: ...
    def __exit__(self, *exc_info: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTarget:
    """The model that is drafted for, and what a drafter with weights of its own is built from.

    Attributes:
        model: without weights until ``Proposer.load_weights`` is called.
        config: of its checkpoint.
        dtype: of activations.
        kernels: that the target runs on.
        make_layers: called once with the format of the drafter's checkpoint, gives what makes the
            drafter's layers; they run on the target's kernels and attention backend, and their
            weights are quantized as ``spec_decode.quantization`` says.
        forwards: runs them.
        open_checkpoint: opens a drafter's checkpoint, called with a path or hub id; without one the
            target's own, to read some of its tensors once more.
        build_model: a model plugin's model for an opened checkpoint, instead of ``make_layers``.
        read_tokens: strings by token id of the tokenizer that comes with a checkpoint, called like
            ``open_checkpoint``; None if there is none.
    """

    model: Model
    config: Mapping[str, Any]
    dtype: torch.dtype
    kernels: Kernels
    forwards: DraftForwards
    make_layers: Callable[[str], LayerFactory]
    open_checkpoint: Callable[..., DraftCheckpoint]
    build_model: Callable[[DraftCheckpoint], Model]
    read_tokens: Callable[..., Sequence[str] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerContext:
    """Facts a proposer may be built on.

    Attributes:
        block_size: KV slots of a block. Blocks that are full may be shared by requests that come
            later, so what a drafter's layers cache for a block is there when ``propose`` returns
            from the step in which the target computed its last token, unless the request is
            dormant.
        target: None where there is no model, as in tests of drafters without weights.
    """

    device: torch.device
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    target: DraftTarget | None = None

    def require_target(self) -> DraftTarget:
        """The model that is drafted for.

        Raises:
            PluginContractError: if there is none.
        """
        if self.target is None:
            raise PluginContractError("a drafter with weights needs a target to be built for")
        return self.target


class Proposer(ABC):
    """Drafts tokens on the rank that samples. Built once per worker as ``factory(options,
    ProposerContext)``, before any weight is read.
    """

    max_draft_tokens: int
    """The most drafts per request and step; the core reserves room for them."""

    requirements: Requirements = Requirements()
    """What it needs; read once, after it was built."""

    def load_weights(self) -> None:  # noqa: B027  # optional: most have none
        """Read its own weights into its layers, which the core then finishes. Called once, after
        the target's were loaded.

        Raises:
            ModelLoadError: if its checkpoint can't be used.
        """

    @abstractmethod
    def propose(self, inputs: ProposeInput) -> DraftTokens:
        """Draft after a step. Called at every step, also when no request may use drafts, so that
        state has no holes, unless ``Requirements.needs_every_step`` is False.
        """

    def forget(self, request_ids: Sequence[str]) -> None:  # noqa: B027  # optional: most keep none
        """Drop state of requests that ended. Called only if
        ``Requirements.needs_finished_requests``.
        """
