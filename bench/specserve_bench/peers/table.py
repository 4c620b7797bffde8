"""The comparison as a table and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from textwrap import fill
from typing import Any

from specserve_bench.bound import Cost, Rates
from specserve_bench.peers.cases import FIGURES, PeerFigure, agreement
from specserve_bench.peers.comparison import Lane, MeasuredGroup, Tried
from specserve_bench.peers.protocol import DRAFT, LOOKUP
from specserve_bench.peers.systems import SPECSERVE, UNQUANTIZED
from specserve_bench.report import markdown_table
from specserve_bench.results import extremes, extremes_over

IS_RATE = {figure.name: figure.is_rate for figure in FIGURES}
MEANINGS = {  # in the summary
    "TPOT ms": "TPOT, ms",
    "TTFT 300 ms": "TTFT, 300-token prompt, ms",
    "TTFT 1000 ms": "TTFT, 1,000-token prompt, ms",
    "batch tokens/s": "32 concurrent requests, tokens/s",
    "guessed TPOT ms": "TPOT with drafting, ms",
    "tokens a step": "tokens per step with drafting",
}
DRAFTERS = {LOOKUP: "n-gram", DRAFT: "draft model"}


def group_result(
    group: MeasuredGroup, draft: str | None, costs: Mapping[str, Cost]
) -> list[dict[str, Any]]:
    """The figures of lanes that were measured in the same rounds."""
    names = {lane.case.name for lane in group.lanes}
    return [
        figure_result(figure, [lane for lane in group.lanes if lane.case.name == figure.case])
        | {"draft": draft, "bound": bound(group.rates, costs.get(figure.name))}
        for figure in FIGURES
        if figure.case in names
    ]


def figure_result(figure: PeerFigure, lanes: Sequence[Lane]) -> dict[str, Any]:
    """Every system's median and extremes over rounds, or its error; and ours over others'."""
    found = {lane.system.name: computed(figure, lane) for lane in lanes}
    values = {name: each for name, each in found.items() if not isinstance(each, str)}
    return {
        "figure": figure.name,
        "systems": {lane.system.name: cell(lane, found[lane.system.name]) for lane in lanes},
        "ratio": over_best_peer(values, figure.is_rate),
        "over_16_bits": over(values, UNQUANTIZED),
    }


def computed(figure: PeerFigure, lane: Lane) -> list[float] | str:
    """The figure of each round, or why there is none."""
    if lane.error is not None:
        return lane.error
    try:
        return [figure.compute(done) for done in lane.rounds]
    except ValueError as e:
        return str(e)


def bound(rates: Sequence[Rates], cost: Cost | None) -> dict[str, float] | None:
    """Milliseconds that reading, or multiplying, takes at least; None without rounds or a cost."""
    return extremes([1e3 * r.seconds(*cost) for r in rates]) if rates and cost else None


def cell(lane: Lane, values: list[float] | str) -> dict[str, Any]:
    if isinstance(values, str):
        return {"error": values}
    assert lane.choice is not None
    return {**extremes(values), "setting": lane.choice.words()}


def over_best_peer(values: Mapping[str, list[float]], is_rate: bool) -> dict[str, Any] | None:
    """Ours / the best peer's in the same round: the median, and the extremes of rounds."""
    peers = [name for name in values if name not in (SPECSERVE, UNQUANTIZED)]
    if not peers:
        return None
    best = (max if is_rate else min)(peers, key=lambda name: median(values[name]))
    return over(values, best)


def over(values: Mapping[str, list[float]], other: str) -> dict[str, Any] | None:
    """Ours over another's, in the same round; None where one of them is missing."""
    if SPECSERVE not in values or other not in values:
        return None
    return {"peer": other, **extremes_over(values[SPECSERVE], values[other])}


def agreements(lanes: Iterable[Lane]) -> dict[str, float]:
    """By system, how much of the plain text is the same as ours, until it parts."""
    plain = {
        lane.system.name: lane.rounds[-1]
        for lane in lanes
        if lane.case.name == "plain" and lane.rounds
    }
    if SPECSERVE not in plain:
        return {}
    return {name: round(agreement(done, plain[SPECSERVE]), 3) for name, done in plain.items()}


def sweep_result(tried: Iterable[Tried]) -> list[dict[str, Any]]:
    return [
        {
            "system": t.system,
            "setting": t.choice.words(),
            "tpot_ms": t.tpot_ms and round(t.tpot_ms, 2),
            "ttft_ms": t.ttft_ms and round(t.ttft_ms, 1),
            "error": t.error,
        }
        for t in tried
    ]


def sweep_table(result: Mapping[str, Any]) -> str:
    rows = (
        [t["system"], t["setting"]]
        + ([t["error"]] if t["error"] else [f"{t['tpot_ms']:.1f}", f"{t['ttft_ms']:.0f}"])
        for t in result["sweep"]
    )
    return markdown_table(["system", "tried with", "TPOT ms", "TTFT ms"], rows)


def table(result: Mapping[str, Any]) -> str:
    """A row for each system, a column for each figure; then the errors, one line each."""
    columns = result["figures"]
    systems = list(dict.fromkeys(name for column in columns for name in column["systems"]))
    rows = [[name, *(shown(column["systems"][name]) for column in columns)] for name in systems]
    rows.append(["bound", *(shown(column["bound"]) for column in columns)])
    rows.append([f"{SPECSERVE} / best peer", *(shown_ratio(c, "ratio") for c in columns)])
    if UNQUANTIZED in systems:
        ratios = (shown_ratio(column, "over_16_bits") for column in columns)
        rows.append([f"{SPECSERVE} / 16 bits", *ratios])
    told = errors(columns)
    named = {"guessed TPOT ms": "TPOT with drafting ms", "tokens a step": "tokens per step"}
    heads = [named.get(c["figure"], c["figure"]) for c in columns]
    drafts = [f", {c['draft']}" if c["draft"] else "" for c in columns]
    lines = [markdown_table(["system", *map("".join, zip(heads, drafts, strict=True))], rows)]
    return "\n".join([*lines, *([""] if told else []), *told])


def summary(result: Mapping[str, Any]) -> str:
    """A row for each figure, a column for each system: medians, the best one bold; last ours
    divided by the best peer's, and the extremes of that ratio in rounds. Cells of rows with
    drafting name the drafter.
    """
    columns, rows = result["figures"], []
    systems = list(dict.fromkeys(name for column in columns for name in column["systems"]))
    for column in columns:
        if column["ratio"] is not None:
            cells = column["systems"]
            medians = {n: c["median"] for n, c in cells.items() if "median" in c}
            best = (max if IS_RATE[column["figure"]] else min)(medians, key=medians.__getitem__)
            told = {n: f"{value:.4g}" for n, value in medians.items()}
            told[best] = f"**{told[best]}**"
            told = {n: text + drafter(cells[n]) for n, text in told.items()}
            ratio = shown_ratio(column, "ratio")
            rows.append([words(column), *(told.get(n, "none") for n in systems), ratio])
    return markdown_table(["", *systems, f"{SPECSERVE} / best peer"], rows)


def caption(result: Mapping[str, Any]) -> str:
    """The machine, the commit and the settings of the tables."""
    machine = result["machine"]
    engines = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    text = (
        f"Measured on {machine['date']} on {machine['cores']} cores of an {machine['cpu']}, at "
        f"commit {machine['commit']}, in {result['rounds']} interleaved rounds: {engines}. Cells "
        "with drafting name the drafter that was fastest for the engine, and its limit of draft "
        "tokens per step. Each engine could use n-grams (its prompt lookup) or the draft model "
        "that the row or column names."
    )
    return fill(text, 100, break_long_words=False, break_on_hyphens=False)


def drafter(cell: Mapping[str, Any]) -> str:
    """The drafter of a cell and its draft tokens per step; nothing without drafting."""
    _, _, name = str(cell.get("setting", "")).partition(", ")
    by, _, tokens = name.partition(" ")
    return f", {DRAFTERS[by]} {tokens}" if by in DRAFTERS else ""


def words(column: Mapping[str, Any]) -> str:
    better = "higher" if IS_RATE[column["figure"]] else "lower"
    draft = f", {column['draft']} available" if column["draft"] else ""
    return f"{MEANINGS.get(column['figure'], column['figure'])}{draft} ({better} is better)"


def shown(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "-"
    if "error" in value:
        return "none"
    return f"{value['median']:.4g} ({value['low']:.4g} to {value['high']:.4g}){drafter(value)}"


def shown_ratio(column: Mapping[str, Any], name: str) -> str:
    """The ratio of the medians that the table shows, and the extremes of rounds' own ratios."""
    found = column[name]
    if found is None:
        return "-"
    ours, peer = (column["systems"][system]["median"] for system in (SPECSERVE, found["peer"]))
    return f"{ours / peer:.2f} ({found['low']:.2f} to {found['high']:.2f}), {found['peer']}"


def errors(columns: Iterable[Mapping[str, Any]]) -> list[str]:
    told = [
        f"{name}: {value['error']}"
        for column in columns
        for name, value in column["systems"].items()
        if "error" in value
    ]
    return list(dict.fromkeys(told))
