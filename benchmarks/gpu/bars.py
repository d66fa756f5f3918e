"""What the figures are to reach, and the table that says whether they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOT_MEASURED = "not measured"
Figures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that is to be reached.

    Attributes:
        part: that measures it.
        figure: in which of its figures.
        key: in that figure.
        what: it is, for people.
        limit: at least that much; at most, for what is best small.
    """

    part: str
    figure: str
    key: str
    what: str
    limit: float
    is_most: bool = False

    def judge(self, parts: Mapping[str, Figures]) -> dict[str, Any]:
        """Whether it is reached, as plain data."""
        value = parts.get(self.part, {}).get(self.figure, {}).get(self.key)
        verdict = NOT_MEASURED
        if value is not None:
            is_reached = value <= self.limit if self.is_most else value >= self.limit
            verdict = "passed" if is_reached else "failed"
        return {
            "what": self.what,
            "value": value,
            "bar": f"{'at most' if self.is_most else 'at least'} {self.limit:g}",
            "verdict": verdict,
        }


def bars(models: Sequence[str], decode: Sequence[tuple[int, int]]) -> Iterator[Bar]:
    """All of them.

    Args:
        models: by name.
        decode: batches and contexts: one request, then many.
    """
    yield Bar("tests", "tests", "num_failed", "GPU tests that fail", 0, is_most=True)
    yield Bar("tests", "tests", "num_passed", "GPU tests that pass", 1)
    for model in models:
        part = f"decode {model}"
        for (batch, context), share in zip(decode, (0.70, 0.60), strict=True):
            name = f"batch {batch}, context {context}"
            what = f"{model}, decode, {name}: share of the bandwidth"
            yield Bar(part, name, "share_of_bandwidth", what, share)
            what = f"{model}, decode, {name}: GPU idle between steps"
            yield Bar(part, name, "idle_between_steps", what, 0.05, is_most=True)
        what = f"{model}, prefill: share of the matrix rate"
        yield Bar(part, "prefill", "share_of_matrix_rate", what, 0.50)
    what = "attention of decode steps alone: share of the bandwidth"
    yield Bar("attention", "decode", "share_of_bandwidth", what, 0.75)
    what = "throughput against transformers' generate_batch"
    yield Bar("comparison", "throughput", "ratio", what, 2.0)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of text, the first row as their heads."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def verdict_rows(judged: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For ``table``."""
    rows = [["what", "measured", "bar", "verdict"]]
    for one in judged:
        value = one["value"]
        shown = "-" if value is None else f"{value:.3g}"
        rows.append([one["what"], shown, one["bar"], one["verdict"]])
    return rows


def figure_rows(parts: Mapping[str, Figures]) -> list[list[str]]:
    """For ``table``: every number."""
    rows = [["part", "figure", "value"]]
    for part, figures in parts.items():
        for name, entries in figures.items():
            for key, value in entries.items():
                shown = NOT_MEASURED if value is None else _shown(value)
                rows.append([part, f"{name}: {key}", shown])
    return rows


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
