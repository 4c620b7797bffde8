"""PNG plots of Results, only from the JSON."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specserve.errors import ConfigError
from specserve_bench.report import Line, grouped, mean, on_machine, scaled_words
from specserve_bench.results import Load, Result, Run

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as e:
    raise ConfigError("plots need matplotlib: pip install 'specserve[bench]'") from e

SIZE = (6.0, 3.6)  # inches
# Okabe and Ito's, which color-blind people can distinguish.
COLORS = ["#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#F0E442"]
# One more than colors, so that 72 subjects have pairs of their own.
MARKERS = "o", "s", "^", "D", "v", "P", "X", "<", ">"
HATCHES = "", "//", "\\\\", "xx", "..", "--", "++", "oo", "||"


class Style(NamedTuple):
    color: str
    marker: str
    hatch: str

    @property
    def of_line(self) -> dict[str, Any]:
        edge = {"markeredgecolor": "black", "markeredgewidth": 0.5}
        return {"color": self.color, "marker": self.marker, "markersize": 5, **edge}


def styles(results: Sequence[Result]) -> dict[str, Style]:
    """Styles by label. A subject's place among all decides, so it looks the same in every plot."""
    labels = dict.fromkeys(label for result in results for label in result.subjects)
    return {
        label: Style(*(kinds[n % len(kinds)] for kinds in (COLORS, MARKERS, HATCHES)))
        for n, label in enumerate(labels)
    }


def draw(results: Sequence[Result], folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Draw the named plots, or all, as far as the results have data for them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in names or PLOTS:
        figure = PLOTS[name](results)
        if figure is not None:
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1], dpi=150)
    return files


def panels(count: int) -> tuple[Figure, list[Any]]:
    """A figure of that many plots, two in a row."""
    width, height = min(count, 2), -(-count // 2)
    figure = Figure(figsize=(SIZE[0] * width, SIZE[1] * height), layout="constrained")
    axes = list(figure.subplots(height, width, squeeze=False).flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def title_of(results: Sequence[Result], result: Result, *parts: str) -> str:
    subject = next(iter(result.subjects.values()))
    scaled = f" (demo, {words})" if (words := scaled_words(result)) else ""
    return f"{subject.model}{scaled}{on_machine(result, results)}\n{', '.join(parts)}"


def places_of(
    results: Sequence[Result], has_data: Callable[[Line], object], num_lines: int = 1
) -> tuple[Figure | None, list[tuple[Any, str, list[Run], list[Line]]]]:
    """A panel for each workload and load with so many lines that have data: its title, its runs,
    and these lines.
    """
    found = [
        (title_of(results, result, place[0], str(place[1])), result, place, lines)
        for result in results
        for place, every in grouped(result)
        if len(lines := [line for line in every if has_data(line)]) >= num_lines
    ]
    if not found:
        return None, []
    figure, axes = panels(len(found))
    return figure, [
        (ax, title, [r for r in result.runs if (r.workload, r.load) == place], lines)
        for ax, (title, result, place, lines) in zip(axes, found, strict=True)
    ]


def latency_cdf(results: Sequence[Result]) -> Figure | None:
    """Share of requests that had ended by a time, all rounds together."""
    figure, places = places_of(results, lambda line: True)
    looks = styles(results)
    for ax, title, runs, _ in places:
        for run in runs:
            times = [a.end_to_end_ms for r in run.rounds for a in r.requests]
            values = sorted(t for t in times if t is not None)
            shares = [(n + 1) / len(values) for n in range(len(values))]
            look = looks[run.subject].of_line | {"markevery": max(1, len(values) // 8)}
            ax.step(values, shares, where="post", label=run.subject, **look)
        label(ax, title, "end-to-end latency, ms (lower is better)", "share of requests done")
    return with_legend(figure, looks)


def tpot_over_concurrency(results: Sequence[Result]) -> Figure | None:
    """For results that have several concurrencies, or several rates."""
    curves = [(r, w) for r in results for w in r.workloads if len(loads_of(r, w)) > 1]
    if not curves:
        return None
    figure, axes = panels(len(curves))
    looks = styles(results)
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
            look = looks[subject].of_line
            ax.plot(*zip(*sorted(found), strict=True), label=subject, **look)
        ax.margins(y=0.1)
        ax.set_ylim(bottom=0)
        axis = "requests a second" if is_open else "requests at a time"
        title = title_of(results, result, workload)
        label(ax, title, axis, "TPOT, ms a token (lower is better)")
    return with_legend(figure, looks)


def acceptance_by_depth(results: Sequence[Result]) -> Figure | None:
    """A panel for each workload and load, of subjects that draft."""
    figure, places = places_of(results, lambda line: line.values["acceptance_by_depth"])
    looks = styles(results)
    for ax, title, _, lines in places:
        for line in lines:
            shares = line.values["acceptance_by_depth"]
            look = looks[line.subject].of_line
            ax.plot(range(1, len(shares) + 1), shares, label=line.subject, **look)
        ax.set_ylim(0, 1.05)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        label(ax, title, "depth, tokens", "share of steps that reach it\n(higher is better)")
    return with_legend(figure, looks)


def tpot_ratios(results: Sequence[Result]) -> Figure | None:
    """TPOT of each subject over the first one's of the same round: medians over rounds, with the
    extremes of rounds as whiskers.
    """
    figure, places = places_of(results, lambda line: line.ratios["tpot_ms"] is not None, 2)
    for ax, title, _, lines in places:
        bars(ax, lines, styles(results))
        about = "whiskers: lowest and highest round; in bars: tokens a step"
        base = lines[0].subject if len(lines[0].subject) <= 20 else "the first"
        y = f"TPOT: median over rounds of the\nratio to {base}, paired (lower is better)"
        label(ax, title, about, y)
    return figure


def bars(ax: Any, lines: Sequence[Line], looks: Mapping[str, Style]) -> None:
    for number, line in enumerate(lines):
        ratio = line.ratios["tpot_ms"]
        assert ratio is not None
        whisker = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        look = looks[line.subject]
        style = {"color": look.color, "hatch": look.hatch, "edgecolor": "white"}
        error = {"ecolor": "black", "capsize": 3}
        ax.bar(number, ratio.median, yerr=whisker, **style, **error)
        length = line.values["acceptance_length"]
        if length is not None:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            ax.text(number, 0.03, f"{length:.2f}", ha="center", fontsize=8, bbox=box)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set_xticks(range(len(lines)), [line.subject for line in lines], rotation=30, ha="right")


def loads_of(result: Result, workload: str) -> list[Load]:
    return list(dict.fromkeys(run.load for run in result.runs if run.workload == workload))


def label(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize=9)
    ax.set_xlabel(x)
    ax.set_ylabel(y)


def with_legend(figure: Figure | None, looks: Mapping[str, Style]) -> Figure | None:
    """One legend for all panels, below them, in the subjects' order."""
    if figure is None:
        return None
    drawn = {
        name: line
        for ax in figure.axes
        for line, name in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    names = [name for name in looks if name in drawn]
    handles, columns = [drawn[name] for name in names], min(len(names), 4)
    figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=8)
    return figure


PLOTS: dict[str, Callable[[Sequence[Result]], Figure | None]] = {
    "latency-cdf": latency_cdf,
    "tpot-over-concurrency": tpot_over_concurrency,
    "acceptance-by-depth": acceptance_by_depth,
    "tpot-ratios": tpot_ratios,
}
