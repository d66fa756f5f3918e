"""The conformance suite of the speculative-decoding contract. Subclass it, name your component, and
run it with pytest.

    class TestMyProposer(ProposerConformance):
        def component(self) -> Component:
            return my_package.hotshoe_component()

A drafter with weights also names the model that it drafts for, which is then built and run as an
engine does:

        @pytest.fixture(autouse=True)
        def checkpoints(self, tmp_path: Path) -> None:
            self.target = str(write_tiny_checkpoint(tmp_path / "target"))
            self.options = {"model": str(my_package.write_tiny_drafter(tmp_path / "drafter"))}
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotshoe.api import (
    Component,
    DraftDraws,
    DraftTokens,
    ProposeInput,
    Proposer,
    ProposerContext,
)
from hotshoe.testing.drafting import DraftedRequest, DraftingRig


@dataclass(frozen=True, slots=True)
class DrivenProposer:
    """A proposer, and the model that it drafts for if it needs one."""

    proposer: Proposer
    rig: DraftingRig | None = None


class _SecondLikeliest(DraftDraws):
    """Draws what nobody would name who doesn't ask.

    Attributes:
        drawn: token by request and place.
    """

    def __init__(self) -> None:
        self.drawn: dict[tuple[int, int], int] = {}

    def draw(
        self,
        logits: Tensor,
        requests: Sequence[int],
        num_drafts_before: Sequence[int],
        token_ids: Tensor | None = None,
    ) -> Tensor:
        found = logits.topk(2).indices[:, 1]
        found = found if token_ids is None else token_ids[found]
        places = zip(requests, num_drafts_before, strict=True)
        self.drawn.update(zip(places, found.tolist(), strict=True))
        return found


class ProposerConformance:
    """What the core relies on.

    Attributes:
        options: under ``spec_decode.options``.
        target: checkpoint of the model that is drafted for; None = drafters that need none.
        engine_settings: of the target's engine, as ``LLM`` takes them.
        vocab_size: of the model that is drafted for.
        hidden_size: of its hidden states, which are random here if there's no target.
    """

    options: Mapping[str, Any] = {}
    target: str | None = None
    engine_settings: Mapping[str, Any] = {}
    vocab_size: int = 50
    hidden_size: int = 32
    max_num_seqs: int = 8
    max_model_len: int = 256
    block_size: int = 16

    def component(self) -> Component:
        """The component under test."""
        raise NotImplementedError("a conformance suite has to name its component")

    def driven(self) -> DrivenProposer:
        """A fresh proposer, ready to draft."""
        component = self.component()
        options = component.options(**self.options)
        if self.target is None:
            context = ProposerContext(
                device=torch.device("cpu"),
                vocab_size=self.vocab_size,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
                block_size=self.block_size,
            )
            return DrivenProposer(cast(Proposer, component.factory(options, context)))
        settings = {
            "dtype": "float32",
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "cache": {"block_size": self.block_size},
        }
        rig = DraftingRig(self.target, **settings | dict(self.engine_settings))
        proposer = cast(Proposer, component.factory(options, rig.context()))
        rig.use(proposer)
        return DrivenProposer(proposer, rig)

    def proposer(self) -> Proposer:
        """A fresh proposer."""
        return self.driven().proposer

    def histories(self) -> list[NDArray[np.int32]]:
        """Committed tokens of some requests: repetitive, random, short."""
        numbers = np.random.default_rng(0)
        pattern = numbers.integers(0, self.vocab_size, 7)
        cases = [
            np.tile(pattern, 6),
            numbers.integers(0, self.vocab_size, 60),
            np.full(20, 3),
            np.array([1, 1]),
        ]
        if self.target is None:  # a step computes a token and brings another
            cases.append(np.array([1]))
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
        layers = () if not histories else self.proposer().requirements.hidden_state_layers
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

    def propose(
        self, driven: DrivenProposer, allowed: Sequence[int], first: int = 0
    ) -> DraftTokens:
        """Drafts for ``histories``, so many for each; the ids of requests count from ``first``."""
        return self.propose_for(driven, self.histories(), allowed, first)

    def propose_for(
        self,
        driven: DrivenProposer,
        histories: Sequence[NDArray[np.int32]],
        allowed: Sequence[int],
        first: int = 0,
        draws: DraftDraws | None = None,
    ) -> DraftTokens:
        """Drafts for given histories, which a target computes from the start in one step."""
        if driven.rig is None:
            inputs = self.inputs(histories, allowed, first)
            return driven.proposer.propose(replace(inputs, draws=draws))
        step = {
            f"request-{first + index}": DraftedRequest(
                token_ids=history.tolist(), num_kept=len(history) - 1, max_draft_tokens=most
            )
            for index, (history, most) in enumerate(zip(histories, allowed, strict=True))
        }
        for request_id in step:
            driven.rig.restart(request_id)
        return driven.rig.step(step, draws=draws)

    def test_component_states_the_contract_it_was_written_for(self) -> None:
        assert self.component().contract == "spec_decode/0"

    def test_limit_of_drafts_is_known_from_the_start(self) -> None:
        assert self.proposer().max_draft_tokens >= 1

    def test_drafts_are_valid_token_ids_and_within_every_limit(self) -> None:
        driven = self.driven()
        most = driven.proposer.max_draft_tokens
        for allowed in (1, 2, 3, most, most + 5):
            drafts = self.propose(driven, [allowed] * len(self.histories()))
            assert len(drafts.token_ids) == len(self.histories())
            for token_ids in drafts.token_ids:
                assert len(token_ids) <= min(allowed, most)
                assert all(type(token_id) is int for token_id in token_ids)
                assert all(0 <= token_id < self.vocab_size for token_id in token_ids)

    def test_a_tree_lists_every_parent_before_its_children(self) -> None:
        drafts = self.propose(self.driven(), [4] * len(self.histories()))
        for token_ids, parents in zip(drafts.token_ids, drafts.parents or [], strict=False):
            assert len(parents) == len(token_ids)
            assert all(-1 <= parent < node for node, parent in enumerate(parents))

    def test_a_request_that_may_use_no_drafts_gets_none(self) -> None:
        allowed = [index % 2 * 3 for index in range(len(self.histories()))]
        drafts = self.propose(self.driven(), allowed)
        for limit, token_ids in zip(allowed, drafts.token_ids, strict=True):
            assert len(token_ids) <= limit

    def test_a_step_without_requests_gives_no_drafts(self) -> None:
        assert list(self.proposer().propose(self.inputs([], [])).token_ids) == []

    def test_drafts_that_were_drawn_are_returned_as_they_are(self) -> None:
        histories, draws = self.histories(), _SecondLikeliest()
        allowed = [1 + index % 4 for index in range(len(histories))]
        drafts = self.propose_for(self.driven(), histories, allowed, draws=draws)
        for request, token_ids in enumerate(drafts.token_ids):
            for place, token_id in enumerate(token_ids):
                assert draws.drawn.get((request, place), token_id) == token_id

    def test_the_same_history_gives_the_same_drafts(self) -> None:
        allowed = [4] * len(self.histories())
        first = self.propose(self.driven(), allowed)
        torch.manual_seed(99)
        assert self.propose(self.driven(), allowed) == first

    def test_a_request_does_not_depend_on_those_beside_it(self) -> None:
        driven, histories = self.driven(), self.histories()
        together = self.propose(driven, [4] * len(histories))
        if driven.rig is None and driven.proposer.requirements.hidden_state_layers:
            return  # the random hidden states aren't those of the same request then
        for index, history in enumerate(histories):
            alone = self.propose_for(self.driven(), [history], [4], index)
            assert alone.token_ids[0] == together.token_ids[index]

    def test_a_forgotten_request_leaves_nothing_behind(self) -> None:
        used, fresh = self.driven(), self.driven()
        histories = [history[::-1].copy() for history in self.histories()]
        allowed = [4] * len(histories)
        self.propose_for(used, histories, allowed)
        used.proposer.forget([f"request-{index}" for index in range(len(histories))])
        used.proposer.forget(["never seen"])
        assert self.propose(used, allowed) == self.propose(fresh, allowed)

    def test_drafts_are_a_function_of_the_tokens_not_of_the_steps_that_led_there(self) -> None:
        driven, histories = self.driven(), self.histories()
        expected = self.propose(self.driven(), [4] * len(histories)).token_ids
        numbers = random.Random(5)
        for index, history in enumerate(histories):
            walked = self._walk(driven, f"walker-{index}", history, numbers)
            assert list(walked) == list(expected[index])

    def test_a_block_can_be_shared_from_the_step_on_that_fills_it(self) -> None:
        driven, numbers = self.driven(), random.Random(6)
        rig = self._rig(driven)
        history = max(self.histories(), key=len)
        expected = self.propose_for(self.driven(), [history], [4]).token_ids[0]
        tokens, computed = history.tolist(), 0
        for number in range(len(tokens) // self.block_size):
            edge = (number + 1) * self.block_size
            while computed < edge:
                kept = min(numbers.randint(1, 5), edge - computed)
                computed += kept
                step = DraftedRequest(token_ids=tokens[: computed + 1], num_kept=kept)
                rig.step({"first": step})
            follower = DraftedRequest(
                token_ids=tokens, num_kept=len(tokens) - 1 - edge, max_draft_tokens=4
            )
            rig.share(f"follower-{number}", "first", edge)
            assert rig.step({f"follower-{number}": follower}).token_ids[0] == expected

    def _rig(self, driven: DrivenProposer) -> DraftingRig:
        if driven.rig is None:
            pytest.skip("it needs no target, so there are no steps to walk through")
        return driven.rig

    def _walk(
        self,
        driven: DrivenProposer,
        request_id: str,
        history: NDArray[np.int32],
        numbers: random.Random,
    ) -> Sequence[int]:
        """Through a history in chunks and rounds, some of whose drafts are refused."""
        rig = self._rig(driven)
        tokens = history.tolist()
        num_prompt, computed = numbers.randint(1, len(tokens) - 1), 0
        drafts: Sequence[int] = []
        while computed < len(tokens) - 1:
            in_prompt = computed < num_prompt
            end = num_prompt if in_prompt else len(tokens) - 1
            right = [
                drafted == token
                for drafted, token in zip(drafts, tokens[computed + 1 :], strict=False)
            ]
            accepted = (
                min(([*right, False]).index(False), end - computed - 1) if not in_prompt else 0
            )
            kept = min(numbers.randint(1, 9), end - computed) if in_prompt else 1 + accepted
            computed += kept
            is_known = computed >= num_prompt
            allowed = numbers.choice((0, 0, 2, 4)) if is_known and computed < len(tokens) - 1 else 4
            step = DraftedRequest(
                token_ids=tokens[: max(num_prompt, computed + 1)],
                num_kept=kept,
                refused=() if in_prompt else tuple(drafts[accepted:]),
                is_verified=not in_prompt,
                max_draft_tokens=allowed if is_known else 0,
                is_dormant=not (is_known and allowed) and numbers.random() < 0.7,
            )
            drafts = rig.step({request_id: step}).token_ids[0]
        return drafts
