"""What one batch of training consists of: windows of conversations, columns of the vocabulary."""

from __future__ import annotations

import math

import torch

from hotshoe.training.batches import cut_windows, make_batch
from hotshoe.training.columns import ColumnSampler
from hotshoe.training.features import Example

NUM_CONTEXT = 3


def example(is_answer: list[bool], first_id: int) -> Example:
    """Tokens with ascending ids."""
    num_tokens = len(is_answer)
    token_ids = torch.arange(first_id, first_id + num_tokens)
    return Example(
        token_ids=token_ids,
        is_answer=torch.tensor(is_answer),
        features=torch.zeros(num_tokens, 6),
        states=token_ids[:, None].float().expand(-1, 2),
        is_greedy=True,
        is_held_out=False,
    )


def test_every_answer_token_is_in_one_window_with_what_is_in_front_of_it() -> None:
    examples = [
        example([False] * 4 + [True] * 9 + [False] * 7 + [True] * 2, 100),
        example([True] * 6, 200),
        example([False] * 12, 300),
    ]
    windows = cut_windows(examples, 4, num_context=NUM_CONTEXT)
    assert max(map(len, windows)) == NUM_CONTEXT + 4
    batch = make_batch([one.cut() for one in windows], NUM_CONTEXT)
    trained = batch.token_ids[batch.rows].tolist()
    assert sorted(trained) == [*range(104, 113), 120, 121, *range(203, 206)]
    number, position = batch.rows
    for distance in range(1, NUM_CONTEXT + 1):
        before = batch.states[number, position - distance, 0]
        assert before.tolist() == [token_id - distance for token_id in trained]


def test_without_a_size_windows_are_whole_conversations() -> None:
    one = example([False, True, True], 0)
    [window] = cut_windows([one], None, num_context=NUM_CONTEXT)
    assert window.cut().token_ids.tolist() == one.token_ids.tolist()


def test_drawn_columns_stand_for_all_rare_tokens() -> None:
    draft_vocab = torch.arange(0, 2000, 2)
    use = torch.zeros(2000, dtype=torch.long)
    use[draft_vocab] = torch.arange(len(draft_vocab), 0, -1)  # the most used ones first
    sampler = ColumnSampler(draft_vocab, use, num_columns=400)
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    in_batch = torch.tensor([1998, 1997, 1900])  # 1997 can't be drafted
    sums = []
    for seed in range(200):
        columns, offsets = sampler.draw(in_batch, seed)
        weights = dict(zip(columns.tolist(), offsets.exp().tolist(), strict=True))
        assert all(weights[column] == 1 for column in (*range(300), 999, 950))
        assert len(columns) in (400, 401, 402)  # those of the batch may be among the drawn ones
        sums.append((logits[columns] + offsets).exp().sum())
    whole = logits.exp().sum()
    # the batch's own two are counted with those that stand for all: 0.3% of the sum
    assert math.isclose(torch.stack(sums).mean(), whole, rel_tol=0.02)


def test_the_same_seed_draws_the_same_columns() -> None:
    draft_vocab = torch.arange(500)
    sampler = ColumnSampler(draft_vocab, torch.ones(500, dtype=torch.long), num_columns=100)
    first, again, other = (sampler.draw(torch.tensor([0]), seed)[0] for seed in (1, 1, 2))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()
