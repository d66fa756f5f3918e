"""``EngineMetrics``: watches one engine core and answers what it has seen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any

from hotshoe.api import FinishedRequest, StepRecord
from hotshoe.metrics.accumulators import Histogram
from hotshoe.metrics.catalog import METRICS
from hotshoe.metrics.exposition import Exposition
from hotshoe.metrics.http import HttpTotals
from hotshoe.metrics.live import LiveView
from hotshoe.metrics.profiler import Profiler

if TYPE_CHECKING:
    from hotshoe.engine.assemble import Engine

_MAX_OPEN_GROUPS = 4096


class EngineMetrics:
    """Metrics of one engine core. They live in its process, so they hold over all API servers.

    Everything but the totals of finished steps is read from the engine when asked for. Methods are
    called by the thread that runs the steps.

    Args:
        engine: watched from now on.

    Attributes:
        totals: counters by name, without prefix.
        histograms: by name, without prefix.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.http = HttpTotals()
        self.totals = {
            metric.name: 0 for metric in METRICS if metric.kind == "counter" and not metric.labels
        }
        self.histograms = {
            metric.name: Histogram(metric.bounds(engine.facts.max_model_len))
            for metric in METRICS
            if metric.kind == "histogram" and not metric.labels
        }
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.stage_times_s: dict[str, float] = {}
        self.drafted_per_position: list[int] = []
        self.accepted_per_position: list[int] = []
        self.num_requests_not_drafted = 0
        self.num_computed_prompt_tokens = 0
        self._groups: dict[str, list[int]] = {}
        self._live = LiveView(self)
        self._exposition = Exposition(self)
        self._profiler = Profiler(engine.config.server.profile_dir)
        engine.core.step_observers.append(self.observe_step)
        engine.core.finish_observers.append(self.observe_finished)

    # -- answers --------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """What clients call the model; the label of every metric."""
        config = self.engine.config
        return (
            config.server.served_model_name[0]
            if config.server.served_model_name
            else (config.model.path)
        )

    def render(self) -> str:
        """Everything in Prometheus' text format."""
        return self._exposition.render()

    def load(self) -> dict[str, Any]:
        """How busy the engine is, in a few numbers; rates are means of the last 10 s."""
        return self._live.load()

    def num_stuck_compile_threads(self) -> int:
        """Threads that still compile a constraint that was given up; when it reaches
        ``guided_decoding.num_compile_threads``, new constraints are refused.
        """
        number: int = self.engine.core.executor.call("num_stuck_compile_threads").result()
        return number

    def live(self, after_step: int = -1) -> dict[str, Any]:
        """What the page shows: load, totals, recent steps and latencies, plugins.

        Args:
            after_step: leave out the steps up to this one, which the caller has.
        """
        return self._live.snapshot(after_step)

    def count_http(self, report: dict[str, Any]) -> None:
        """Add what an API server process has counted since its last report."""
        self.http.add(report)

    def start_profile(self, kind: str = "torch") -> str:
        """Profile the steps from now on; returns where the profile will be.

        Raises:
            RequestError: if a profile is being taken already, or the kind is unknown.
        """
        return self._profiler.start(kind)

    def stop_profile(self) -> str:
        """Stop profiling; returns where the profile was written.

        Raises:
            RequestError: if none is being taken.
        """
        return self._profiler.stop()

    # -- observers ------------------------------------------------------------------------

    def observe_step(self, step: StepRecord) -> None:
        """Count a committed step."""
        totals, histograms = self.totals, self.histograms
        totals["num_preemptions"] += step.num_preempted
        if not step.request_ids:
            return  # it only told the workers who has ended
        totals["generation_tokens"] += step.num_new_tokens
        self.num_computed_prompt_tokens += step.num_prefill_tokens
        histograms["iteration_tokens_total"].observe(
            step.num_prefill_tokens + step.num_decode_tokens
        )
        histograms["step_time_seconds"].observe(step.timings_s.get("total", 0.0))
        stages = self.stage_times_s
        for stage, seconds in step.timings_s.items():
            if stage != "total":
                stages[stage] = stages.get(stage, 0.0) + seconds
        if step.inter_token_times_s:
            histograms["inter_token_latency_seconds"].observe_all(step.inter_token_times_s)
        if step.first_token_times_s:
            totals["prompt_tokens"] += step.num_prompt_tokens
            totals["prompt_tokens_cached"] += step.num_cached_tokens
            histograms["time_to_first_token_seconds"].observe_all(step.first_token_times_s)
        self.num_requests_not_drafted = step.num_requests_not_drafted
        if step.num_drafts:
            self._observe_drafts(step)
        self._live.add(step)

    def _observe_drafts(self, step: StepRecord) -> None:
        totals = self.totals
        totals["spec_decode_num_drafts"] += step.num_drafts
        totals["spec_decode_num_draft_tokens"] += step.num_draft_tokens
        totals["spec_decode_num_accepted_tokens"] += step.num_accepted_tokens
        _add_by_position(self.drafted_per_position, step.drafted_per_position)
        _add_by_position(self.accepted_per_position, step.accepted_per_position)
        lengths = self.histograms["spec_decode_accepted_length"]
        # as many had so many kept at least
        at_least = [step.num_drafts, *step.accepted_per_position, 0]
        for length, (count, count_longer) in enumerate(pairwise(at_least)):
            lengths.observe_all([length] * (count - count_longer))

    def acceptance(self) -> list[float]:
        """Share of the drafts verified at each place that was kept."""
        return [
            kept / drafted
            for drafted, kept in zip_longest(
                self.drafted_per_position, self.accepted_per_position, fillvalue=0
            )
        ]

    def observe_finished(self, request: FinishedRequest) -> None:
        """Count a request that has ended."""
        observe = self._observe
        self.finished[request.finish_reason] = self.finished.get(request.finish_reason, 0) + 1
        observe("request_prompt_tokens", request.num_prompt_tokens)
        observe("request_generation_tokens", request.num_output_tokens)
        observe("request_num_preemptions", request.num_preemptions)
        observe("e2e_request_latency_seconds", request.finish_time_s - request.arrival_time_s)
        if request.max_tokens is not None:
            observe("request_params_max_tokens", request.max_tokens)
        if request.choice_index == 0:
            observe("request_params_n", request.num_choices)
        self._observe_longest(request)
        compiled = request.compiled_time_s
        if compiled is not None:
            observe("request_constraint_time_seconds", max(compiled - request.arrival_time_s, 0.0))
        scheduled, first = request.first_scheduled_time_s, request.first_token_time_s
        if scheduled is not None:
            observe("request_queue_time_seconds", max(scheduled - request.arrival_time_s, 0.0))
        last = request.last_token_time_s
        if scheduled is None or first is None or last is None:
            return
        observe("request_prefill_time_seconds", first - scheduled)
        observe("request_decode_time_seconds", last - first)
        observe("request_inference_time_seconds", last - scheduled)
        if request.num_output_tokens > 1:
            per_token = (last - first) / (request.num_output_tokens - 1)
            observe("request_time_per_output_token_seconds", per_token)

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def _observe_longest(self, request: FinishedRequest) -> None:
        """Choices of one prompt are told from others by their id, ``<prompt's id>/<index>``."""
        num_left, longest = request.num_choices - 1, request.num_output_tokens
        if request.num_choices > 1:
            group = request.request_id.rpartition("/")[0]
            num_left, known = self._groups.pop(group, [request.num_choices, 0])
            num_left, longest = num_left - 1, max(known, longest)
            if num_left:
                # choices that were never queued leave their group open
                if len(self._groups) >= _MAX_OPEN_GROUPS:
                    del self._groups[next(iter(self._groups))]
                self._groups[group] = [num_left, longest]
        if not num_left:
            self._observe("request_max_num_generation_tokens", longest)


def _add_by_position(totals: list[int], counts: Sequence[int]) -> None:
    totals += [0] * (len(counts) - len(totals))
    for position, count in enumerate(counts):
        totals[position] += count
