"""Finite automata over bytes: written as networks, determined, and cut to what can still match."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_STATES = 4000
"""Most states of an automaton."""

_MAX_WORK = 200_000  # steps of building one: some tenths of a second


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Automaton:
    """A deterministic automaton. State 0 is the start. Equal to itself only.

    Attributes:
        transitions: ``[num_states + 1, 256]`` int16, the next state by byte; the last state is the
            dead one. Every other can still lead to a match.
        is_final: ``[num_states + 1]`` bool.
    """

    transitions: NDArray[np.int16]
    is_final: NDArray[np.bool_]


class NotHandledError(Exception):
    """A pattern is left to the library."""


class Work:
    """Counts steps, so that no pattern takes long."""

    def __init__(self) -> None:
        self.left = _MAX_WORK

    def __call__(self, number: int = 1) -> None:
        self.left -= number
        if self.left < 0:
            raise NotHandledError


@dataclass(slots=True)
class Network:
    """An automaton that may be in several states at once (Thompson 1968).

    Attributes:
        edges: by state, sets of bytes as 256-bit numbers, each with the state it leads to.
        free: by state, states that are reached without a byte.
    """

    edges: list[list[tuple[int, int]]]
    free: list[list[int]]
    work: Work

    def add(self) -> int:
        self.work()
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1


Piece = Callable[[Network, int], int]
"""Writes a part of a pattern behind a state, and returns the state at its end."""


def determined(piece: Piece) -> Automaton | None:
    """The automaton of a pattern, by the sets of states that a network can be in."""
    work = Work()
    network = Network([], [], work)
    end = piece(network, network.add())
    masks = sorted({mask for edges in network.edges for mask, _ in edges})
    work(256 * len(masks))
    number_of: dict[tuple[bool, ...], int] = {}
    class_of = np.array(
        [
            number_of.setdefault(tuple(bool(mask >> byte & 1) for mask in masks), len(number_of))
            for byte in range(256)
        ]
    )
    classes_of = {
        mask: [number for members, number in number_of.items() if members[at]]
        for at, mask in enumerate(masks)
    }
    starts = _closure(network, [0])
    states = {starts: 0}
    queue = [starts]
    rows: list[dict[int, int]] = []
    for current in queue:
        targets: dict[int, set[int]] = {}
        for state in current:
            for mask, target in network.edges[state]:
                work(len(classes_of[mask]))
                for number in classes_of[mask]:
                    targets.setdefault(number, set()).add(target)
        row = {}
        for number, reached in targets.items():
            following = _closure(network, reached)
            if following not in states:
                if len(states) == MAX_STATES:
                    return None
                states[following] = len(states)
                queue.append(following)
            row[number] = states[following]
        rows.append(row)
    is_final = np.array([end in current for current in queue])
    return _trimmed(rows, is_final, class_of)


def _closure(network: Network, starts: Sequence[int] | set[int]) -> frozenset[int]:
    """States that are reached without a byte, those included."""
    found, pending = set(starts), list(starts)
    while pending:
        network.work()
        for state in network.free[pending.pop()]:
            if state not in found:
                found.add(state)
                pending.append(state)
    return frozenset(found)


def _trimmed(
    rows: Sequence[Mapping[int, int]], is_final: NDArray[np.bool_], class_of: NDArray[np.int64]
) -> Automaton | None:
    """Tables without the states that lead to no match; None if the start is one."""
    before: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for target in row.values():
            before[target].append(state)
    pending = np.flatnonzero(is_final).tolist()
    alive = set(pending)
    while pending:
        for state in before[pending.pop()]:
            if state not in alive:
                alive.add(state)
                pending.append(state)
    if 0 not in alive:
        return None
    dead = len(rows)
    transitions = np.full((dead + 1, 256), dead, np.int16)
    by_class = np.full(int(class_of.max()) + 1, dead, np.int16)
    for state, row in enumerate(rows):
        by_class[:] = dead
        for number, target in row.items():
            if target in alive:
                by_class[number] = target
        transitions[state] = by_class[class_of]
    return Automaton(transitions=transitions, is_final=np.append(is_final, False))
