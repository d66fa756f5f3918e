"""The conformance suite of the speculative-decoding contract. Subclass it, name your component, and
run it with pytest.

    class TestMyProposer(ProposerConformance):
        def component(self) -> Component:
            return my_package.hotshoe_component()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hotshoe.api import Component, DraftTokens, ProposeInput, Proposer, ProposerContext


class ProposerConformance:
    """What the core relies on.

    Attributes:
        options: under ``spec_decode.options``.
        vocab_size: of the model that is drafted for.
        hidden_size: of its hidden states, which are random here.
    """

    options: ClassVar[dict[str, Any]] = {}
    vocab_size: ClassVar[int] = 50
    hidden_size: ClassVar[int] = 32
    max_num_seqs: ClassVar[int] = 8
    max_model_len: ClassVar[int] = 256
    block_size: ClassVar[int] = 16

    def component(self) -> Component:
        """The component under test."""
        raise NotImplementedError("a conformance suite has to name its component")

    def proposer(self) -> Proposer:
        """A fresh proposer."""
        component = self.component()
        context = ProposerContext(
            device=torch.device("cpu"),
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            block_size=self.block_size,
        )
        return cast(Proposer, component.factory(component.options(**self.options), context))

    def histories(self) -> list[NDArray[np.int32]]:
        """Committed tokens of some requests: repetitive, random, short."""
        numbers = np.random.default_rng(0)
        pattern = numbers.integers(0, self.vocab_size, 7)
        cases = [
            np.tile(pattern, 6),
            numbers.integers(0, self.vocab_size, 60),
            np.full(20, 3),
            np.array([1]),
            np.array([1, 1]),
        ]
        return [case.astype(np.int32) for case in cases]

    def inputs(
        self,
        histories: Sequence[NDArray[np.int32]],
        max_draft_tokens: Sequence[int],
        first: int = 0,
    ) -> ProposeInput:
        """The record of a step that ran one token of each request."""
        for token_ids in histories:
            token_ids.flags.writeable = False
        layers = self.proposer().requirements.hidden_state_layers
        states = np.random.default_rng(1).normal(size=(len(histories), self.hidden_size))
        return ProposeInput(
            request_ids=[f"request-{first + index}" for index in range(len(histories))],
            token_ids=histories,
            num_computed_tokens=[len(token_ids) - 1 for token_ids in histories],
            max_draft_tokens=max_draft_tokens,
            num_drafted=[0] * len(histories),
            num_accepted=[0] * len(histories),
            query_start_loc=list(range(len(histories) + 1)),
            hidden_states={layer: torch.from_numpy(states).float() for layer in layers},
        )

    def propose(self, proposer: Proposer, allowed: int, first: int = 0) -> DraftTokens:
        """Drafts for ``histories``, ``allowed`` of them for each request."""
        histories = self.histories()
        return proposer.propose(self.inputs(histories, [allowed] * len(histories), first))

    def test_component_states_the_contract_it_was_written_for(self) -> None:
        assert self.component().contract == "spec_decode/0"

    def test_limit_of_drafts_is_known_from_the_start(self) -> None:
        assert self.proposer().max_draft_tokens >= 1

    def test_drafts_are_valid_token_ids_and_within_every_limit(self) -> None:
        proposer = self.proposer()
        for allowed in (1, 2, 3, proposer.max_draft_tokens, proposer.max_draft_tokens + 5):
            drafts = self.propose(proposer, allowed)
            assert len(drafts.token_ids) == len(self.histories())
            for token_ids in drafts.token_ids:
                assert len(token_ids) <= min(allowed, proposer.max_draft_tokens)
                assert all(type(token_id) is int for token_id in token_ids)
                assert all(0 <= token_id < self.vocab_size for token_id in token_ids)

    def test_a_tree_lists_every_parent_before_its_children(self) -> None:
        drafts = self.propose(self.proposer(), 4)
        for token_ids, parents in zip(drafts.token_ids, drafts.parents or [], strict=False):
            assert len(parents) == len(token_ids)
            assert all(-1 <= parent < node for node, parent in enumerate(parents))

    def test_a_request_that_may_use_no_drafts_gets_none(self) -> None:
        histories = self.histories()
        allowed = [index % 2 * 3 for index in range(len(histories))]
        drafts = self.proposer().propose(self.inputs(histories, allowed))
        for limit, token_ids in zip(allowed, drafts.token_ids, strict=True):
            assert len(token_ids) <= limit

    def test_a_step_without_requests_gives_no_drafts(self) -> None:
        assert list(self.proposer().propose(self.inputs([], [])).token_ids) == []

    def test_the_same_history_gives_the_same_drafts(self) -> None:
        first = self.propose(self.proposer(), 4)
        torch.manual_seed(99)
        assert self.propose(self.proposer(), 4) == first

    def test_a_request_does_not_depend_on_those_beside_it(self) -> None:
        histories = self.histories()
        together = self.propose(self.proposer(), 4)
        if self.proposer().requirements.hidden_state_layers:
            return  # the random hidden states aren't those of the same request then
        for index, history in enumerate(histories):
            alone = self.proposer().propose(self.inputs([history], [4], index))
            assert alone.token_ids[0] == together.token_ids[index]

    def test_a_forgotten_request_leaves_nothing_behind(self) -> None:
        used, fresh = self.proposer(), self.proposer()
        histories = [history[::-1].copy() for history in self.histories()]
        inputs = self.inputs(histories, [4] * len(histories))
        used.propose(inputs)
        used.forget(inputs.request_ids)
        used.forget(["never seen"])
        assert self.propose(used, 4) == self.propose(fresh, 4)
