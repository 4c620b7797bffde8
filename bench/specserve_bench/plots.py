"""PNG plots of Results, from the JSON alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specserve.errors import ConfigError
from specserve_bench.report import Line, grouped, mean, scaled_words
from specserve_bench.results import Load, Result, Run

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as e:
    raise ConfigError("plots need matplotlib: pip install 'specserve[bench]'") from e

SIZE = (6.0, 3.6)  # inches


def draw(results: Sequence[Result], folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Draw the named plots, or all, as far as the results have data for them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in names or PLOTS:
        figure = PLOTS[name](results)
        if figure is not None:
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1], dpi=100)
    return files


def panels(count: int) -> tuple[Figure, list[Any]]:
    """A figure of that many plots, two in a row."""
    width, height = min(count, 2), -(-count // 2)
    figure = Figure(figsize=(SIZE[0] * width, SIZE[1] * height), layout="constrained")
    axes = list(figure.subplots(height, width, squeeze=False).flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def title_of(result: Result, *parts: str) -> str:
    subject = next(iter(result.subjects.values()))
    scaled = f" (demo, {words})" if (words := scaled_words(result)) else ""
    return ", ".join([f"{subject.model}{scaled}", *parts])


def latency_cdf(results: Sequence[Result]) -> Figure | None:
    """Share of requests that had ended by a time, all rounds together."""
    places = [(r, place) for r in results for place, _ in grouped(r)]
    if not places:
        return None
    figure, axes = panels(len(places))
    for ax, (result, (workload, load)) in zip(axes, places, strict=True):
        for run in runs_at(result, workload, load):
            times = [a.end_to_end_ms for r in run.rounds for a in r.requests]
            values = sorted(t for t in times if t is not None)
            shares = [(n + 1) / len(values) for n in range(len(values))]
            ax.step(values, shares, where="post", label=run.subject)
        label(ax, title_of(result, workload, str(load)), "end-to-end latency, ms", "share")
    return figure


def tpot_over_concurrency(results: Sequence[Result]) -> Figure | None:
    """For results that have several concurrencies, or several rates."""
    curves = [(r, w) for r in results for w in r.workloads if len(loads_of(r, w)) > 1]
    if not curves:
        return None
    figure, axes = panels(len(curves))
    for ax, (result, workload) in zip(axes, curves, strict=True):
        is_open = loads_of(result, workload)[0].rate is not None
        points: dict[str, list[tuple[float, float]]] = {}
        for (name, load), lines in grouped(result):
            for line in lines if name == workload else []:
                at = load.rate if is_open else load.concurrency
                value = mean(line.values["tpot_ms"])
                if at is not None and value is not None:
                    points.setdefault(line.subject, []).append((at, value))
        for subject, found in points.items():
            ax.plot(*zip(*sorted(found), strict=True), marker="o", label=subject)
        ax.margins(y=0.1)
        ax.set_ylim(bottom=0)
        axis = "requests a second" if is_open else "requests at a time"
        label(ax, title_of(result, workload), axis, "mean TPOT, ms")
    return figure


def acceptance_by_depth(results: Sequence[Result]) -> Figure | None:
    """For subjects that guess, a panel for each workload and load."""
    found = [
        (result, place, [line for line in lines if line.values["acceptance_by_depth"]])
        for result in results
        for place, lines in grouped(result)
    ]
    found = [entry for entry in found if entry[2]]
    if not found:
        return None
    figure, axes = panels(len(found))
    for ax, (result, (workload, load), lines) in zip(axes, found, strict=True):
        for line in lines:
            shares = line.values["acceptance_by_depth"]
            ax.plot(range(1, len(shares) + 1), shares, marker="o", label=line.subject)
        ax.set_ylim(0, 1)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        title = title_of(result, workload, str(load))
        label(ax, title, "depth", "share of steps that reach it")
    return figure


def tpot_ratios(results: Sequence[Result]) -> Figure | None:
    """TPOT of each subject over the first one's, with the extremes of rounds as whiskers."""
    found = [
        (result, place, [line for line in lines if line.ratios["tpot_ms"] is not None])
        for result in results
        for place, lines in grouped(result)
    ]
    found = [entry for entry in found if len(entry[2]) > 1]
    if not found:
        return None
    figure, axes = panels(len(found))
    for ax, (result, (workload, load), lines) in zip(axes, found, strict=True):
        bars(ax, lines)
        label(
            ax,
            title_of(result, workload, str(load)),
            "",
            "TPOT over the first one's",
        )
    return figure


def bars(ax: Any, lines: Sequence[Line]) -> None:
    names = dict.fromkeys(line.subject.split(":")[0] for line in lines)  # of drafters
    colors = {name: f"C{number}" for number, name in enumerate(names)}
    for number, line in enumerate(lines):
        ratio = line.ratios["tpot_ms"]
        assert ratio is not None
        whisker = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        ax.bar(
            number, ratio.median, yerr=whisker, capsize=3, color=colors[line.subject.split(":")[0]]
        )
        length = line.values["acceptance_length"]
        if length is not None:
            ax.text(number, 0.02, f"{length:.2f}", ha="center", fontsize=8)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set_xticks(range(len(lines)), [line.subject for line in lines], rotation=30, ha="right")


def runs_at(result: Result, workload: str, load: Load) -> list[Run]:
    return [run for run in result.runs if run.workload == workload and run.load == load]


def loads_of(result: Result, workload: str) -> list[Load]:
    return list(dict.fromkeys(run.load for run in result.runs if run.workload == workload))


def label(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize=9)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8)


PLOTS: dict[str, Callable[[Sequence[Result]], Figure | None]] = {
    "latency-cdf": latency_cdf,
    "tpot-over-concurrency": tpot_over_concurrency,
    "acceptance-by-depth": acceptance_by_depth,
    "tpot-ratios": tpot_ratios,
}
