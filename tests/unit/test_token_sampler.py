"""``TokenSampler``: every feature against a slow per-token reference, with and without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hotshoe.api import (
    LogitsBatch,
    LogitsProcessor,
    NewRequest,
    PluginContractError,
    RequestError,
    SampleInput,
    Sampler,
    SamplingParams,
    SamplingParamsError,
    ShapeError,
)
from hotshoe.testing.distributions import Filter, filtered_probabilities
from hotshoe.worker.sampling import (
    SampledTokens,
    TokenSampler,
    check_logits_processors,
    prompt_logprobs,
    verify,
)
from unit.sampling_harness import (
    CPU,
    EOS,
    EVEN,
    NUM_OUTPUT,
    PARAMS,
    PROMPTS,
    STOP_IDS,
    VOCAB_SIZE,
    Drafter,
    Harness,
    ListGrammar,
    Running,
    bad_drafts,
    mixed_drafts,
    model,
    no_drafts,
    reference_output,
    repeated_drafts,
    standard_sampler,
    step_of,
)


@pytest.mark.parametrize("drafter", [no_drafts, bad_drafts, mixed_drafts, repeated_drafts])
@pytest.mark.parametrize("name", PARAMS)
def test_tokens_are_those_of_the_reference_with_any_drafts(name: str, drafter: Drafter) -> None:
    harness = Harness([PARAMS[name]] * 2)
    outputs = harness.run(NUM_OUTPUT, drafter)
    for running, output in zip(harness.running.values(), outputs, strict=True):
        one = running.request
        expected = reference_output(
            one.sampling_params, one.prompt_token_ids, one.seed, one.choice_index, NUM_OUTPUT
        )
        assert output == expected


@pytest.mark.parametrize("drafter", [no_drafts, mixed_drafts])
def test_requests_of_every_kind_do_not_disturb_each_other(drafter: Drafter) -> None:
    chosen = list(PARAMS.values())
    for some in (chosen[:6], chosen[6:]):
        together = Harness(some)
        outputs = together.run(NUM_OUTPUT, drafter)
        for running, output in zip(together.running.values(), outputs, strict=True):
            one = running.request
            expected = reference_output(
                one.sampling_params, one.prompt_token_ids, one.seed, one.choice_index, NUM_OUTPUT
            )
            assert output == expected


def test_good_drafts_are_accepted() -> None:
    harness = Harness([PARAMS["seeded"]])
    one = harness.running[0].request
    expected = reference_output(one.sampling_params, one.prompt_token_ids, one.seed, 0, 8)
    assert harness.step(lambda _: expected[:4]).token_ids == [expected[:5]]
    assert harness.step(lambda _: [expected[5], (expected[6] + 1) % VOCAB_SIZE]).token_ids == [
        expected[5:7]
    ]


def test_a_preempted_request_goes_on_with_the_same_tokens_on_another_row() -> None:
    undisturbed = Harness([PARAMS["everything"], PARAMS["bad_words"]]).run(NUM_OUTPUT)
    harness = Harness([PARAMS["everything"], PARAMS["bad_words"]])
    harness.run(9)
    first, second = harness.take(0), harness.take(1)
    harness.place(5, second)
    harness.place(1, first)
    outputs = harness.run(NUM_OUTPUT)
    assert outputs == undisturbed


def test_a_request_that_joins_later_gets_its_own_parameters() -> None:
    harness = Harness([PARAMS["greedy"]])
    harness.step()
    params = PARAMS["allowed"]
    harness.place(3, Running(NewRequest("new", 3, [1], params, 7, 0, 0, (), STOP_IDS), [1]))
    harness.run(NUM_OUTPUT)
    assert harness.running[3].output[:NUM_OUTPUT] == reference_output(params, [1], 7, 0, NUM_OUTPUT)
    harness.take(3)
    harness.place(3, Running(NewRequest("next", 3, [1], PARAMS["greedy"], 7, 0, 0, (), ()), [1]))
    harness.run(NUM_OUTPUT)
    assert harness.running[3].output[:NUM_OUTPUT] == reference_output(
        PARAMS["greedy"], [1], 7, 0, NUM_OUTPUT
    )


def test_choices_of_one_seed_differ_and_a_seed_repeats() -> None:
    outputs = []
    for choice in (0, 1, 0):
        harness = Harness([])
        request = NewRequest("r", 0, [1, 2], SamplingParams(temperature=2.0), 5, choice, 0, ())
        harness.place(0, Running(request, [1, 2]))
        outputs.append(harness.run(12))
    assert outputs[0] == outputs[2] != outputs[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_float_type_are_taken(dtype: torch.dtype) -> None:
    harness = Harness([PARAMS["greedy"]])
    logits = torch.arange(VOCAB_SIZE, 0, -1).to(dtype)[None]
    step = step_of(harness, logits)
    assert harness.sampler.sample(step).token_ids == [[0]]


def test_shapes_that_do_not_fit_are_refused() -> None:
    harness = Harness([PARAMS["greedy"]])
    with pytest.raises(ShapeError, match="2 rows of logits and 1 lists of drafts for 1 requests"):
        harness.sampler.sample(step_of(harness, torch.zeros(2, VOCAB_SIZE)))
    with pytest.raises(ShapeError, match=f"logits are 5 wide, not {VOCAB_SIZE}"):
        harness.sampler.sample(step_of(harness, torch.zeros(1, 5)))
    with pytest.raises(ShapeError, match="3 drawn tokens for 4 positions"):
        verify([[1], [2]], [1, 2, 3])


def test_a_step_in_which_nobody_samples_gives_nothing() -> None:
    harness = Harness([])
    sampled = harness.sampler.sample(step_of(harness, torch.zeros(0, VOCAB_SIZE), ()))
    assert sampled == SampledTokens(token_ids=[])


def test_verify_keeps_drafts_up_to_the_first_difference() -> None:
    assert verify([[1, 2], [], [5, 6], [7]], [1, 2, 3, 4, 5, 9, 9, 8, 8]) == [
        [1, 2, 3],
        [4],
        [5, 9],
        [8],
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_without_any_allowed_token_fails_alone(temperature: float) -> None:
    blocked = SamplingParams(
        temperature=temperature,
        allowed_token_ids=(EOS, 5),
        min_tokens=3,
        bad_words_token_ids=((9,),),
    )
    harness = Harness([SamplingParams(temperature=temperature), blocked])
    alone = Harness([SamplingParams(temperature=temperature)]).run(3)
    sampled = harness.step()
    assert sampled.token_ids[1] == []
    assert sampled.errors == {
        1: "no token can be sampled: together, allowed_token_ids, bad_words, min_tokens mask every "
        "one; loosen one of them"
    }
    assert sampled.error_fields == {1: "allowed_token_ids"}
    assert [harness.run(3)[0]] == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_fail_their_request_alone(
    temperature: float, value: float
) -> None:
    def broken(tokens: Sequence[int]) -> np.ndarray:
        logits = model(tokens)
        if list(tokens[:1]) == PROMPTS[1]:
            logits[4] = value
        return logits

    params = SamplingParams(temperature=temperature, logprobs=1)
    harness = Harness([params] * 3, model=broken)
    sampled = harness.step()
    assert sampled.errors == {1: f"logits hold {value}, which no token can be sampled from"}
    assert sampled.error_fields == {}
    assert [len(new) for new in sampled.token_ids] == [1, 0, 1]
    assert sorted(sampled.logprobs) == [0, 2]


class Doubler(LogitsProcessor):
    """Doubles logits, and remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int], list[int], Any]] = []

    def apply(self, batch: LogitsBatch) -> None:
        assert not any(prompt.flags.writeable for prompt in batch.prompt_token_ids)
        for row, request_id in enumerate(batch.request_ids):
            prompt = batch.prompt_token_ids[row].tolist()
            output = batch.output_token_ids[row].tolist()
            self.seen.append((request_id, prompt, output, batch.extra_args[row]))
        batch.logits.mul_(2)


class Forcer(LogitsProcessor):
    """Only allows the token that ``extra_args`` names; raises for requests that name none."""

    def apply(self, batch: LogitsBatch) -> None:
        for row, extra_args in enumerate(batch.extra_args):
            batch.logits[row, :5] = 0.0
            if extra_args is None or "force" not in extra_args:
                raise ValueError("extra_args has no 'force'")
            kept = batch.logits[row, extra_args["force"]].clone()
            batch.logits[row] = -torch.inf
            batch.logits[row, extra_args["force"]] = kept


def test_a_processor_applies_to_those_that_name_it_or_to_all() -> None:
    for is_always, expected in ((False, {"r1"}), (True, {"r0", "r1"})):
        doubler = Doubler()
        named = SamplingParams(
            temperature=0, logits_processors=("double",), extra_args={"any": "thing"}
        )
        harness = Harness(
            [SamplingParams(temperature=0), named], processors={"double": (doubler, is_always)}
        )
        harness.step(lambda running: [6, 7] if running.request.request_id == "r1" else [])
        assert {entry[0] for entry in doubler.seen} == expected
        histories = [entry[1:] for entry in doubler.seen if entry[0] == "r1"]
        assert histories == [(PROMPTS[1], drafts, {"any": "thing"}) for drafts in ([], [6], [6, 7])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_raises_fails_only_the_requests_it_raises_for(temperature: float) -> None:
    chosen = [
        SamplingParams(temperature=temperature, logits_processors=names, extra_args=extra_args)
        for names, extra_args in (
            ((), None),
            (("force",), {"force": 13}),
            (("force",), None),
            (("force",), {"force": 6}),
        )
    ]
    harness = Harness(chosen, processors={"force": (Forcer(), False)})
    sampled = harness.step()
    assert sampled.errors == {
        2: "logits processor 'force' failed with ValueError: extra_args has no 'force'"
    }
    assert sampled.token_ids[1:] == [[13], [], [6]]
    assert sampled.token_ids[:1] == Harness(chosen[:1]).step().token_ids


class Demanding(LogitsProcessor):
    """Wants ``extra_args``, and says so."""

    def apply(self, batch: LogitsBatch) -> None:
        if None in batch.extra_args:
            raise RequestError("extra_args are missing")


def test_an_error_that_is_the_request_s_fault_names_the_parameter() -> None:
    chosen = [
        SamplingParams(temperature=0, extra_args=extra_args) for extra_args in (None, {"any": 1})
    ]
    sampled = Harness(chosen, processors={"demands": (Demanding(), True)}).step()
    assert sampled.errors == {0: "logits processor 'demands': extra_args are missing"}
    assert sampled.error_fields == {0: "extra_args"}
    assert len(sampled.token_ids[1]) == 1


class Negator(LogitsProcessor):
    """Raises, after it has changed all rows, if one of them isn't for it."""

    def apply(self, batch: LogitsBatch) -> None:
        batch.logits.neg_()
        if None in batch.extra_args:
            raise ValueError("not mine")


@pytest.mark.parametrize("asking", [[0, 1, 2], [0, 2], [1]])
def test_what_a_processor_did_before_it_raised_is_taken_back(asking: list[int]) -> None:
    chosen = [
        SamplingParams(
            temperature=0,
            logits_processors=("negate",) if index in asking else (),
            extra_args=None if index == 2 else {"mine": True},
        )
        for index in range(3)
    ]
    sampled = Harness(chosen, processors={"negate": (Negator(), False)}).step()
    for index, prompt in enumerate(PROMPTS):
        logits = model(prompt)
        if index != 2:
            best = (-logits if index in asking else logits).argmax()
            assert sampled.token_ids[index] == [best]
    assert set(sampled.errors) == {2} & set(asking)


class FailsLater(LogitsProcessor):
    """Raises once two tokens are there."""

    def apply(self, batch: LogitsBatch) -> None:
        if any(len(output) >= 2 for output in batch.output_token_ids):
            raise RuntimeError("two is enough")


def test_an_error_behind_drafts_comes_when_it_would_come_without_them() -> None:
    results = []
    for drafter in (no_drafts, mixed_drafts):
        harness = Harness([PARAMS["greedy"]], processors={"late": (FailsLater(), True)})
        harness.run(10, drafter)
        results.append((harness.running[0].output, harness.running[0].error))
    assert results[0] == results[1]
    assert len(results[0][0]) == 2
    assert results[0][1] == "logits processor 'late' failed with RuntimeError: two is enough"


def test_a_processor_that_is_not_loaded_is_refused_with_those_that_are() -> None:
    params = SamplingParams(logits_processors=("double", "treble"))
    check_logits_processors(params, ["double", "treble"])
    with pytest.raises(SamplingParamsError, match="'treble', allowed: loaded processors: double;"):
        check_logits_processors(params, ["double"])


def one_hot(token_id: int) -> np.ndarray:
    logits = np.zeros(VOCAB_SIZE, np.float32)
    logits[token_id] = 50.0
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_masks_and_follows_the_output_with_any_drafts(temperature: float) -> None:
    params = [SamplingParams(temperature=temperature)] * 2
    plain = Harness(params, grammars=[ListGrammar(EVEN), None])
    outputs = plain.run(7)
    assert all(token_id % 2 == 0 for token_id in outputs[0])
    assert outputs[0][6] == EOS
    assert plain.running[0].grammar.accepted == outputs[0][:6]  # type: ignore[union-attr]
    assert outputs[1] == Harness(params).run(7)[1]

    def good_then_bad(running: Running) -> list[int]:
        row = int(running.request.request_id[1:])
        start = len(running.output)
        return [*outputs[row][start : min(start + 2, 6)], 3]

    drafted = Harness(params, grammars=[ListGrammar(EVEN), None])
    assert drafted.run(7, good_then_bad) == outputs
    assert drafted.running[0].grammar.accepted[:6] == outputs[0][:6]  # type: ignore[union-attr]


class CountingGrammar(ListGrammar):
    """Counts its masks."""

    num_masks = 0

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        self.num_masks += 1
        super().fill_bitmask(bitmask, row)


@pytest.mark.parametrize(("temperature", "num_masks"), [(0.0, 2), (1.0, 6)])
def test_a_greedy_request_needs_masks_only_where_its_best_token_is_refused(
    temperature: float, num_masks: int
) -> None:
    params = [SamplingParams(temperature=temperature)]
    free = Harness(params).run(6)[0]
    assert EOS not in free
    allowed = [{token_id} for token_id in free]
    allowed[2] = allowed[4] = {7, 8, 9} - set(free)
    grammar = CountingGrammar(allowed)
    harness = Harness(params, grammars=[grammar], model=lambda _: next(logits))
    logits = iter([one_hot(token_id) for token_id in free])
    assert harness.run(6)[0][:2] == free[:2]
    assert grammar.num_masks == num_masks


class BrokenGrammar(ListGrammar):
    """Raises once it's asked for the second token."""

    def validate(self, token_ids: Sequence[int]) -> int:
        if self.accepted:
            raise ZeroDivisionError("inside the library")
        return super().validate(token_ids)


def test_a_grammar_that_fails_on_a_greedy_token_fails_its_request_alone() -> None:
    params = [PARAMS["greedy"]] * 2
    harness = Harness(params, grammars=[BrokenGrammar(EVEN), ListGrammar(EVEN)])
    harness.step()
    sampled = harness.step()
    assert set(sampled.errors) == {0}
    assert "backend failed: inside the library" in sampled.errors[0]
    assert len(sampled.token_ids[1]) == 1


def test_drafts_of_a_fixed_sequence_are_accepted_through_its_end() -> None:
    grammar = ListGrammar([[4], [8], [15]])
    harness = Harness([PARAMS["greedy"]], grammars=[grammar])
    assert harness.step(lambda _: [4, 8, 15]).token_ids == [[4, 8, 15, EOS]]
    assert grammar.accepted == [4, 8, 15]


def test_nothing_but_stop_tokens_follows_a_complete_grammar_with_drafts_too() -> None:
    grammar = ListGrammar([[4]])
    harness = Harness([PARAMS["greedy"]], grammars=[grammar])
    assert harness.step(lambda _: [4, EOS, EOS, 7]).token_ids == [[4, EOS, EOS, EOS]]
    assert grammar.accepted == [4]


def test_a_refused_draft_leaves_the_grammar_where_the_output_is() -> None:
    grammar = ListGrammar([[4], [8], [15]])
    harness = Harness([PARAMS["greedy"]], grammars=[grammar])
    assert harness.step(lambda _: [4, 7, 15]).token_ids == [[4, 8]]
    assert grammar.accepted == [4, 8]


def test_a_grammar_against_min_tokens_fails_the_request_with_both_named() -> None:
    params = SamplingParams(temperature=0, min_tokens=5)
    harness = Harness([params, PARAMS["greedy"]], grammars=[ListGrammar([[4]]), None])
    harness.step()
    sampled = harness.step()
    assert sampled.errors == {
        0: "no token can be sampled: together, min_tokens, the structured output mask every one; "
        "loosen one of them"
    }
    assert sampled.error_fields == {0: "min_tokens"}
    assert len(sampled.token_ids[1]) == 1


@pytest.mark.parametrize("num_top", [0, 1, 4, -1])
@pytest.mark.parametrize("drafter", [no_drafts, mixed_drafts])
def test_logprobs_are_those_of_the_model_before_any_change(num_top: int, drafter: Drafter) -> None:
    changed = SamplingParams(
        temperature=0.5,
        logprobs=num_top,
        presence_penalty=1.0,
        allowed_token_ids=tuple(range(9)),
    )
    harness = Harness([SamplingParams(), changed, SamplingParams(logprobs=0)])
    harness.run(6, drafter)
    assert harness.running[0].logprobs == []
    running = harness.running[1]
    assert len(running.logprobs) == len(running.output)
    for number, entry in enumerate(running.logprobs):
        logits = model(running.request.prompt_token_ids + running.output[:number])
        expected = np.log(filtered_probabilities(logits, Filter()))
        ranked = sorted(range(VOCAB_SIZE), key=lambda token_id: -expected[token_id])  # used at once
        width = VOCAB_SIZE if num_top < 0 else num_top
        chosen = running.output[number]
        assert entry.token.token_id == chosen
        assert entry.token.logprob == pytest.approx(expected[chosen], abs=1e-5)
        assert entry.token.rank == ranked.index(chosen) + 1
        assert [top.token_id for top in entry.top] == ranked[:width]
        assert [top.rank for top in entry.top] == list(range(1, width + 1))
        values = [top.logprob for top in entry.top]
        assert values == pytest.approx(expected[ranked[:width]], abs=1e-5)


def test_prompt_logprobs_score_the_given_tokens() -> None:
    prompt = [1, 4, 4, 9]
    logits = torch.from_numpy(np.stack([model(prompt[:num]) for num in (1, 2, 3)]))
    entries = prompt_logprobs(logits, prompt[1:], 2)
    expected = logits.log_softmax(-1)
    assert [entry.token.token_id for entry in entries] == prompt[1:]
    for row, entry in enumerate(entries):
        assert entry.token.logprob == pytest.approx(float(expected[row, prompt[row + 1]]))
        assert [top.token_id for top in entry.top] == expected[row].topk(2).indices.tolist()
    with pytest.raises(ShapeError, match="3 rows of logits but 2 target tokens"):
        prompt_logprobs(logits, [1, 2], 1)
    assert prompt_logprobs(logits[:0], [], 1) == []


def test_equally_likely_tokens_share_a_rank_and_come_by_id() -> None:
    (entry,) = prompt_logprobs(torch.tensor([[0.0, 1.0, 1.0, 2.0]]), [2], 4)
    assert entry.token.rank == 2
    assert [(top.token_id, top.rank) for top in entry.top] == [(3, 1), (1, 2), (2, 2), (0, 4)]


class WrongSampler(Sampler):
    """Returns what it is told to."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def candidates(self, inputs: SampleInput) -> Any:
        raise NotImplementedError("this sampler only draws")

    def draw(self, inputs: SampleInput, uniforms: Tensor) -> Tensor:
        return self.tokens


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([VOCAB_SIZE]), "token ids from 21 to 21; allowed: 0 to 20"),
        (torch.tensor([-1]), "token ids from -1 to -1; allowed: 0 to 20"),
        (torch.tensor([1.0]), r"torch.float32 of shape \(1,\); allowed: int64 of shape \(1,\)"),
        (torch.tensor([1, 2]), r"torch.int64 of shape \(2,\); allowed: int64 of shape \(1,\)"),
    ],
)
def test_what_a_sampler_returns_is_checked(tokens: Tensor, message: str) -> None:
    harness = Harness([])
    sampler = TokenSampler(
        sampler=WrongSampler(tokens), max_num_seqs=8, vocab_size=VOCAB_SIZE, device=CPU
    )
    sampler.add_row(0, NewRequest("r0", 0, [1], SamplingParams(), 1, 0, 0, ()))
    with pytest.raises(PluginContractError, match=f"sampler 'WrongSampler' returned {message}"):
        sampler.sample(step_of(harness, torch.zeros(1, VOCAB_SIZE)))


@pytest.mark.parametrize("vocab_size", [1, 300, 1024, 1300, 2048])
def test_greedy_tokens_are_the_first_of_the_largest_logits(vocab_size: int) -> None:
    harness = Harness([])
    sampler = TokenSampler(
        sampler=standard_sampler(), max_num_seqs=8, vocab_size=vocab_size, device=CPU
    )
    for row in range(8):
        sampler.add_row(row, NewRequest(f"r{row}", row, [1], PARAMS["greedy"], 1, 0, 0, ()))
    numbers = np.random.default_rng(0)
    for scale in (0, 2, 500):
        logits = torch.from_numpy(np.round(numbers.normal(size=(8, vocab_size)) * scale)).float()
        logits[:, -1] += 1 if scale == 2 else 0
        expected = [[int(np.argmax(row))] for row in logits.numpy()]
        assert sampler.sample(step_of(harness, logits, [()] * 8)).token_ids == expected


def test_a_top_p_too_small_for_float32_keeps_the_most_likely_token() -> None:
    smallest = SamplingParams(temperature=1.0, top_p=1e-320)
    greedy = SamplingParams(temperature=0)
    assert Harness([smallest]).run(3) == Harness([greedy]).run(3)
