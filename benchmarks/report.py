"""Tables and plots of a comparison, written into docs/performance.md.

    python benchmarks/report.py benchmarks/results/cpu-2-cores-peers.json

Whatever stands between the page's markers is replaced; plots go to docs/images. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "performance.md"
OURS, PEERS = "#c2410c", "#94a3b8"
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One figure of a table.

    Attributes:
        is_rate: more is better; else a time.
        convert: from the figure as stored to the one shown.
    """

    heading: str
    workload: str
    part: str
    figure: str
    digits: int = 0
    is_rate: bool = False
    convert: Callable[[float, Found], float] = lambda value, part: value


def _prompt_rate(ttft_ms: float, part: Found) -> float:
    return float(part["figures"]["num_prompt_tokens"]["median"] / ttft_ms * 1e3)


MAIN = (
    Column("throughput, output tokens/s", "throughput", "", "output_tokens_per_s", 0, True),
    Column("latency, ms per token", "latency", "", "tpot_ms", 2),
    Column("to the first token, ms", "latency", "", "ttft_ms", 0),
    Column("prefill, tokens/s", "prefill", "", "ttft_ms", 0, True, _prompt_rate),
    Column("copy, tokens/s", "copy", "", "output_tokens_per_s", 0, True),
)
PLOTTED = (MAIN[0], MAIN[1], MAIN[3])
PREFIX = (
    Column("cold, s", "prefix", "cold", "elapsed_s", 2),
    Column("warm, s", "prefix", "warm", "elapsed_s", 2),
)


def write_report(result_path: Path, page: Path = PAGE) -> None:
    """Replace the tables and plots of the page."""
    result = json.loads(result_path.read_text())
    images = page.parent / "images"
    images.mkdir(exist_ok=True)
    draw(result, images / "peers.svg")
    text = page.read_text()
    page.write_text(replace_between(text, "peers", "\n".join(lines_of(result, result_path))))
    print(page)


def replace_between(text: str, name: str, content: str) -> str:
    """Put content between the markers of a name.

    Raises:
        ValueError: if the text has none.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in text or end not in text:
        raise ValueError(f"no {begin!r} and {end!r} in the page; add them where the tables belong")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def lines_of(result: Found, path: Path) -> Iterator[str]:
    """The Markdown."""
    machine, best = result["machine"], result["limits"]["best"]
    yield (
        f"{machine['cpu']}, {machine['num_cores']} cores, {machine['memory_gb']:.0f} GiB, "
        f"{machine['cpu_capability']}; {result['time'][:10]}; model: {result['model']['name']}. "
        f"Command: `{result['command']}`; every round and setting: "
        f"[{path.name}](../benchmarks/results/{path.name})."
    )
    if best:
        yield (
            f"The machine reads {best['read_gb_per_s']:.0f} GB/s and multiplies "
            f"{best['bf16_gop_per_s']:.0f} GFLOP/s in bfloat16, {best['int8_gop_per_s']:.0f} GOP/s "
            "in int8."
        )
    yield ""
    yield "![throughput, latency and prefill of each engine](images/peers.svg)"
    yield ""
    yield from table(result, MAIN)
    yield ""
    yield "Requests with a prefix in common, all 16 of them:"
    yield ""
    yield from table(result, PREFIX)
    structured = structured_columns(result)
    if structured:
        yield ""
        yield "Structured output, ms per token:"
        yield ""
        yield from table(result, structured)
    yield ""
    yield "Start and memory:"
    yield ""
    yield "| engine | version | process start to first token, s | memory at the end, MB |"
    yield "|---|---|---|---|"
    for name, entry in result["engines"].items():
        start = entry["start_s"]["median"]
        yield (
            f"| {name} | {entry['description']['version']} | {start:.1f} | "
            f"{entry.get('memory_mb', '-')} |"
        )
    if result["left_out"]:
        yield ""
        for name, reason in result["left_out"].items():
            yield f"Left out: {name}, {reason}."


def structured_columns(result: Found) -> list[Column]:
    """One per part that some engine has figures of."""
    parts: dict[str, None] = {}
    for entry in result["engines"].values():
        found = entry["workloads"].get("structured", {}).get("parts", {})
        parts |= dict.fromkeys(part for part in found if "figures" in found[part])
    return [Column(part, "structured", part, "tpot_ms", 1) for part in parts]


def table(result: Found, columns: Sequence[Column]) -> Iterator[str]:
    """Medians with their spread and, in brackets, how much of the limit that is."""
    yield "| | " + " | ".join(column.heading for column in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, entry in result["engines"].items():
        cells = [cell(entry, column) for column in columns]
        if any(one != "-" for one in cells):
            yield f"| {name} | " + " | ".join(cells) + " |"


def part_of(entry: Found, column: Column) -> Found | None:
    """What an engine has for a column; None if nothing."""
    parts = entry["workloads"].get(column.workload, {}).get("parts", {})
    part: Found = parts.get(column.part, {})
    return part if part.get("figures", {}).get(column.figure) else None


def cell(entry: Found, column: Column) -> str:
    """Median, least to most, share of the limit."""
    part = part_of(entry, column)
    if part is None:
        return "-"
    values = {
        key: column.convert(value, part) for key, value in part["figures"][column.figure].items()
    }
    low, high = sorted((values["min"], values["max"]))
    digits = column.digits
    shown = f"**{values['median']:,.{digits}f}** ({low:,.{digits}f} to {high:,.{digits}f})"
    share = limit_share(entry, column, column.figure)
    if share is not None:
        shown += f", {share:.0%}"
    if column.figure == "output_tokens_per_s" and column.workload == "throughput":
        separate = limit_share(entry, column, "separate_tokens_per_s")
        if separate is not None:
            shown += f" ({separate:.0%} op by op)"
    return shown


def limit_share(entry: Found, column: Column, name: str) -> float | None:
    """How much of one of the machine's limits is reached: the median over rounds, each with the
    limit that was measured in it.
    """
    shares = []
    for one in entry["workloads"][column.workload]["rounds"]:
        limit = ((one.get("limit") or {}).get(column.part) or {}).get(name)
        if limit:
            share = one["parts"][column.part][column.figure] / limit
            shares.append(share if column.figure == "output_tokens_per_s" else 1 / share)
    return median(shares) if shares else None


def draw(result: Found, path: Path) -> None:
    """Bars for the main figures, with spread and limit."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hotshoe"
    from matplotlib import pyplot

    shown = [(column, rows) for column in PLOTTED if (rows := list(_bars(result, column)))]
    if not shown:
        return
    height = 0.36 * max(len(rows) for _, rows in shown) + 1.4
    figure, axes = pyplot.subplots(1, len(shown), figsize=(3.7 * len(shown), height), squeeze=False)
    for axis, (column, rows) in zip(axes[0], shown, strict=True):
        rows.reverse()  # the first on top
        axis.barh(
            [bar.name for bar in rows],
            [bar.median for bar in rows],
            xerr=[[bar.median - bar.low for bar in rows], [bar.high - bar.median for bar in rows]],
            color=[OURS if bar.name.startswith("hotshoe") else PEERS for bar in rows],
            ecolor="#334155",
            capsize=2,
        )
        for at, bar in enumerate(rows):
            if bar.limit is not None:
                axis.plot([bar.limit] * 2, [at - 0.4, at + 0.4], color="#0f172a", linestyle=":")
        better = "more" if column.is_rate else "less"
        axis.set_title(f"{column.heading} ({better} is better)", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.text(0.5, 0.01, "dotted: the machine's limit for these weights", ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


@dataclass(frozen=True)
class _Bar:
    name: str
    median: float
    low: float
    high: float
    limit: float | None


def _bars(result: Found, column: Column) -> Iterator[_Bar]:
    for name, entry in result["engines"].items():
        part = part_of(entry, column)
        if part is None:
            continue
        spread = part["figures"][column.figure]
        median = column.convert(spread["median"], part)
        ends = [column.convert(spread[key], part) for key in ("min", "max")]
        limit = (part.get("limit") or {}).get(column.figure)
        shown_limit = column.convert(limit, part) if limit else None
        yield _Bar(name, median, min(ends), max(ends), shown_limit)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    write_report(arguments.result, arguments.page)


if __name__ == "__main__":
    main()
