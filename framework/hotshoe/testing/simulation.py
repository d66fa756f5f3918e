"""The real planner, scheduler and KV cache over a make-believe worker in virtual time.

``simulate`` runs a policy over a list of arrivals within milliseconds and without a model, to try
it out or to test it. The worker makes tokens up, but it is strict: it replays every plan on a model
of its own and of the KV pages, and a plan that doesn't fit stops the simulation.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hotshoe.api import (
    EvictionPolicy,
    Executor,
    FinishedRequest,
    PendingResult,
    SamplingParams,
    Scheduler,
    SchedulerContext,
    StepPlan,
    StepRecord,
    StepResult,
    StructuredOutputs,
)
from hotshoe.engine.core import EngineCore
from hotshoe.engine.planner import PlannerLimits
from hotshoe.engine.request import EngineRequest
from hotshoe.errors import SchedulerStalledError
from hotshoe.kv_cache import KVCacheManager

VOCAB_SIZE = 1000
EOS = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a simulation.

    Attributes:
        num_output_tokens: tokens it asks for; it ends earlier only if ``ends_early``.
        time_s: when it arrives.
        shared_prefix: prompts with an equal value begin alike, in their first half; None = with
            nobody's.
        aborted_at_s: when its client goes away; None = never.
        needs_grammar: whether it can't run before a grammar is compiled.
        ends_early: whether it stops at the first end-of-sequence token, one in 8.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    time_s: float = 0.0
    priority: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    shared_prefix: int | None = None
    aborted_at_s: float | None = None
    needs_grammar: bool = False
    ends_early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """The sizes of a simulated engine, and what its steps cost.

    Attributes:
        num_blocks: KV blocks of ``block_size`` tokens.
        max_in_flight: as ``Executor.max_in_flight``.
        max_draft_tokens: drafts per request and step that the worker offers at most; 0 = off.
        step_time_s: seconds a step takes, plus ``token_time_s`` for each token.
        grammar_time_s: seconds it takes to compile a grammar.
    """

    num_blocks: int = 256
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int = 512
    long_prefill_token_threshold: int | None = None
    max_preemptions_without_progress: int = 3
    num_lookahead_slots: int = 0
    enable_prefix_caching: bool = True
    max_in_flight: int = 1
    max_draft_tokens: int = 0
    step_time_s: float = 0.01
    token_time_s: float = 0.0001
    grammar_time_s: float = 0.05

    @property
    def scheduler_context(self) -> SchedulerContext:
        """What a scheduler for it is built on."""
        return SchedulerContext(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
        )

    def core(self, scheduler: Scheduler, executor: SimulatedExecutor | None = None) -> EngineCore:
        """A fresh engine core on a simulated worker."""
        return EngineCore(
            scheduler=scheduler,
            executor=executor or SimulatedExecutor(self),
            kv_cache=KVCacheManager(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                eviction=OldestFirst(),
                enable_prefix_caching=self.enable_prefix_caching,
            ),
            limits=PlannerLimits(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                max_preemptions_without_progress=self.max_preemptions_without_progress,
                num_lookahead_slots=self.num_lookahead_slots,
            ),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
        )


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came of it.

    Attributes:
        finished: by index of the arrival, how each request ended.
        token_ids: by index of the arrival, its output.
        steps: every committed step.
        duration_s: virtual seconds from the start to the last commit.
        num_free_blocks: at the end; all, unless something leaked.
    """

    finished: dict[int, FinishedRequest]
    token_ids: dict[int, list[int]]
    steps: list[StepRecord]
    duration_s: float
    num_free_blocks: int


def simulate(
    scheduler: Scheduler,
    arrivals: Sequence[Arrival],
    engine: SimulatedEngine | None = None,
    *,
    core: EngineCore | None = None,
) -> Simulation:
    """Serve arrivals to their end, in virtual time.

    Args:
        scheduler: the policy.
        arrivals: in any order.
        engine: sizes and costs; by default those of ``SimulatedEngine()``.
        core: one that ``engine.core`` made; by default a fresh one.

    Raises:
        RequestError: if an arrival can never be served.
        SchedulerError: if the policy broke its contract.
        SchedulerStalledError: if it idles though nothing will happen any more.
        EngineDeadError: if a plan doesn't fit what the worker was told before.
    """
    engine = engine or SimulatedEngine()
    core = core or engine.core(scheduler)
    return _Run(core, arrivals).to_the_end()


def request_of(index: int, arrival: Arrival) -> EngineRequest:
    """The engine's request of an arrival; its id is the index."""
    return EngineRequest(
        request_id=str(index),
        prompt_token_ids=prompt_of(index, arrival),
        sampling_params=SamplingParams(
            max_tokens=arrival.num_output_tokens,
            ignore_eos=not arrival.ends_early,
            structured_outputs=StructuredOutputs(regex="a") if arrival.needs_grammar else None,
        ),
        seed=index,
        priority=arrival.priority,
        metadata=dict(arrival.metadata),
    )


def prompt_of(index: int, arrival: Arrival) -> list[int]:
    """The made-up prompt of an arrival."""
    count = arrival.num_prompt_tokens
    shared = 0 if arrival.shared_prefix is None else count // 2
    prefix = [_mixed(arrival.shared_prefix or 0, place, 1) for place in range(shared)]
    return prefix + [_mixed(index, place, 2) for place in range(shared, count)]


def output_of(index: int, arrival: Arrival) -> list[int]:
    """The tokens that a request gets if nobody aborts it, whatever the policy."""
    tokens: list[int] = []
    for place in range(arrival.num_output_tokens):
        tokens.append(_token(index, arrival.num_prompt_tokens + place))
        if arrival.ends_early and tokens[-1] == EOS:
            break
    return tokens


class OldestFirst(EvictionPolicy):
    """Evicts the block that was freed first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block_id: int, is_cached: bool) -> None:
        self._blocks[block_id] = None

    def remove(self, block_id: int) -> None:
        del self._blocks[block_id]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]


@dataclass(slots=True)
class _Row:
    """What a worker knows of a running request."""

    request_id: str
    seed: int
    tokens: list[int]
    num_computed: int
    block_ids: list[int]
    drafts: int = 0
    has_failed: bool = False


class SimulatedExecutor(Executor):
    """One make-believe worker that checks what it is told.

    A token is a function of the request's seed and its position. Each KV slot holds a digest of the
    tokens up to it, so a block that was given to two requests, or given away too early, is noticed.

    Attributes:
        now: the virtual clock.
        rows: what the worker knows, by row.
        saved: preempted requests by id.
        failing: ids of requests that fail when they get their next token.
        num_steps: plans submitted.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self.max_in_flight = engine.max_in_flight
        self.now = 0.0
        self.rows: dict[int, _Row] = {}
        self.saved: dict[str, _Row] = {}
        self.failing: set[str] = set()
        self.num_steps = 0
        self._engine = engine
        self._pages: list[list[int | None]] = [
            [None] * engine.block_size for _ in range(engine.num_blocks)
        ]
        self._busy_until = 0.0
        self._last_step_id = -1
        self._compiling: list[tuple[float, Future[Any]]] = []

    def clock(self) -> float:
        """Virtual seconds."""
        return self.now

    def advance_to(self, time_s: float) -> None:
        """Let time pass."""
        self.now = max(self.now, time_s)
        done = [one for one in self._compiling if one[0] <= self.now]
        self._compiling = [one for one in self._compiling if one[0] > self.now]
        for _, future in done:
            future.set_result(None)

    @property
    def next_event_s(self) -> float | None:
        """When the next grammar will be compiled."""
        return min((time_s for time_s, _ in self._compiling), default=None)

    def submit(self, plan: StepPlan) -> PendingResult:
        self.num_steps += 1
        self._apply(plan)
        result = self._execute(plan)
        cost = self._engine.step_time_s + self._engine.token_time_s * plan.num_tokens
        start = max(self.now, self._busy_until)
        self._busy_until = start + cost
        return _Pending(self, self._busy_until, result)

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if method == "compile_grammar":
            self._compiling.append((self.now + self._engine.grammar_time_s, future))
        else:
            future.set_exception(AttributeError(f"a simulated worker has no method {method!r}"))
        return future

    def close(self) -> None:
        pass

    def _apply(self, plan: StepPlan) -> None:
        _check(plan.step_id > self._last_step_id, "step ids go up")
        self._last_step_id = plan.step_id
        by_id = {row.request_id: number for number, row in self.rows.items()}
        for request_id in plan.finished_request_ids:
            # those that ended while their grammar was compiled are unknown
            self.saved.pop(request_id, None)
            self.rows.pop(by_id.get(request_id, -1), None)
        for request_id in plan.preempted_request_ids:
            _check(by_id.get(request_id, -1) in self.rows, f"preempted {request_id!r} runs")
            self.saved[request_id] = self.rows.pop(by_id[request_id])
        placed = set()
        for resumed in plan.resumed_requests:
            _check(
                resumed.request_id in self.saved, f"resumed {resumed.request_id!r} was preempted"
            )
            known = self.saved.pop(resumed.request_id)
            self._place(resumed.row, known, resumed.num_computed_tokens, resumed.block_ids)
            placed.add(resumed.row)
        for new in plan.new_requests:
            running = {row.request_id for row in self.rows.values()}
            _check(
                new.request_id not in running | set(self.saved), f"new {new.request_id!r} is new"
            )
            row = _Row(new.request_id, new.seed, list(new.prompt_token_ids), 0, [])
            self._place(new.row, row, new.num_computed_tokens, new.block_ids)
            placed.add(new.row)
        for appended in plan.appended_blocks:
            _check(appended.row in self.rows, f"row {appended.row} is taken")
            _check(appended.row not in placed, f"row {appended.row} got all its blocks already")
            _check(bool(appended.block_ids[0]), "something is appended")
            placed.add(appended.row)
            self.rows[appended.row].block_ids += appended.block_ids[0]

    def _place(
        self, number: int, row: _Row, num_computed: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        _check(0 <= number < self._engine.max_num_seqs, f"row {number} exists")
        _check(number not in self.rows, f"row {number} is free")
        _check(num_computed < len(row.tokens), "the last token is left to compute")
        row.num_computed, row.block_ids, row.drafts = num_computed, list(block_ids[0]), 0
        self.rows[number] = row

    def _execute(self, plan: StepPlan) -> StepResult:
        columns = (plan.request_ids, plan.rows, plan.num_scheduled_tokens, plan.num_draft_slots)
        _check(len({len(column) for column in columns}) == 1, "columns are equally long")
        _check(len(set(plan.rows)) == len(plan.rows), "no row runs twice")
        _check(plan.num_tokens <= self._engine.max_num_batched_tokens, "the budget holds")
        token_ids, used, wanted = [], [], []
        errors: dict[int, str] = {}
        for index, (request_id, number, num_tokens, slots) in enumerate(zip(*columns, strict=True)):
            row = self.rows[number]
            _check(row.request_id == request_id, f"row {number} is that of {request_id!r}")
            _check(num_tokens > slots >= 0, "a request runs more than drafts")
            drafts = min(slots, row.drafts)
            # one that failed may be in further steps that were submitted before
            new = [] if row.has_failed else self._run(row, num_tokens - slots, drafts, slots)
            if row.has_failed or (new and request_id in self.failing):
                row.has_failed = True
                errors[index], new = "made to fail", []
            row.tokens += new
            most = self._engine.max_draft_tokens
            row.drafts = _mixed(row.seed, len(row.tokens), 3) % (most + 1) if new else 0
            token_ids.append(new)
            used.append(drafts)
            wanted.append(row.drafts)
        return StepResult(
            plan.step_id,
            token_ids=token_ids,
            num_drafts_used=used,
            num_draft_tokens_wanted=wanted,
            errors=errors,
        )

    def _run(self, row: _Row, num_tokens: int, num_drafts: int, slots: int) -> list[int]:
        """New tokens of one request, its pages read and written on the way."""
        end, known = row.num_computed + num_tokens, len(row.tokens)
        _check(end <= known, f"{row.request_id!r} runs known tokens only")
        _check(not slots or end == known, "drafts follow the last known token")
        room = len(row.block_ids) * self._engine.block_size
        _check(end + slots <= room, f"{row.request_id!r} has room for its tokens and drafts")
        _check(len(set(row.block_ids)) == len(row.block_ids), "no block is in a table twice")
        num_accepted = _mixed(row.seed, known, 4) % (num_drafts + 1) if end == known else 0
        new = [_token(row.seed, known + place) for place in range(num_accepted + 1)]
        content = row.tokens[:end] + new[:num_accepted]
        self._touch(row, content, row.num_computed)
        row.num_computed = end + num_accepted
        return new if end == known else []

    def _touch(self, row: _Row, content: list[int], num_computed: int) -> None:
        digest = 0
        block_size = self._engine.block_size
        for position, token in enumerate(content):
            digest = hash((digest, token, position))
            block, offset = divmod(position, block_size)
            page = self._pages[row.block_ids[block]]
            if position < num_computed:
                _check(
                    page[offset] == digest,
                    f"{row.request_id!r} finds its own KV at position {position}",
                )
            else:
                page[offset] = digest


@dataclass(frozen=True, slots=True)
class _Pending:
    executor: SimulatedExecutor
    time_s: float
    value: StepResult

    def result(self) -> StepResult:
        self.executor.advance_to(self.time_s)
        return self.value


class _Run:
    """One simulation on its way."""

    def __init__(self, core: EngineCore, arrivals: Sequence[Arrival]) -> None:
        assert isinstance(core.executor, SimulatedExecutor)
        self._core = core
        self._executor = core.executor
        self._arrivals = arrivals
        self._start = self._executor.now
        order = sorted(range(len(arrivals)), key=lambda index: arrivals[index].time_s)
        self._coming = deque((self._start + arrivals[index].time_s, index) for index in order)
        leaving = [
            (self._start + one.aborted_at_s, index)
            for index, one in enumerate(arrivals)
            if one.aborted_at_s is not None
        ]
        self._leaving = deque(sorted(leaving))
        self._finished: dict[int, FinishedRequest] = {}
        self._token_ids: dict[int, list[int]] = {index: [] for index in range(len(arrivals))}
        self._steps: list[StepRecord] = []

    def to_the_end(self) -> Simulation:
        core = self._core
        core.step_observers.append(self._steps.append)
        core.finish_observers.append(self._note_finished)
        try:
            while self._coming or core.has_work:
                self._come_and_go()
                num_steps, was_busy = self._executor.num_steps, bool(core.in_flight)
                for update in core.step():
                    self._token_ids[int(update.request_id)] += update.new_token_ids
                if self._executor.num_steps == num_steps and not was_busy:
                    self._let_time_pass()
        finally:
            core.step_observers.remove(self._steps.append)
            core.finish_observers.remove(self._note_finished)
        return Simulation(
            self._finished,
            self._token_ids,
            self._steps,
            self._executor.now - self._start,
            core.kv_cache.num_free_blocks,
        )

    def _note_finished(self, request: FinishedRequest) -> None:
        self._finished[int(request.request_id)] = request

    def _come_and_go(self) -> None:
        while self._coming and self._coming[0][0] <= self._executor.now:
            _, index = self._coming.popleft()
            self._core.add_request(request_of(index, self._arrivals[index]))
        while self._leaving and self._leaving[0][0] <= self._executor.now:
            _, index = self._leaving.popleft()
            self._core.abort([str(index)])

    def _let_time_pass(self) -> None:
        """Go to the next thing that can happen by itself."""
        core = self._core
        events = [queue[0][0] for queue in (self._coming, self._leaving) if queue]
        for event in (core.planner.idle_until, self._executor.next_event_s):
            if event is not None and event > self._executor.now:
                events.append(event)
        if events:
            self._executor.advance_to(min(events))
        elif core.requests:
            why = core.planner.idle_reason
            raise SchedulerStalledError(
                f"scheduler {type(core.scheduler).__name__} idles ({why!r}) with "
                f"{len(core.requests)} requests alive, and nothing else will happen"
            )


def _check(is_true: bool, what: str) -> None:
    if not is_true:
        raise AssertionError(f"broken promise of a plan: {what}")


def _mixed(*numbers: int) -> int:
    """A number from 1 to ``VOCAB_SIZE - 1`` that looks random."""
    value = 0
    for number in numbers:
        value = (value * 6364136223846793005 + number * 1442695040888963407 + 1) & (2**64 - 1)
        value ^= value >> 29
    return value % (VOCAB_SIZE - 1) + 1


def _token(seed: int, position: int) -> int:
    value = _mixed(seed, position, 5)
    return EOS if value % 8 == 0 else value
