"""The comparison as a table and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from specserve_bench.bound import Cost, Rates
from specserve_bench.machine import measured
from specserve_bench.peers.cases import FIGURES, PeerFigure, agreement
from specserve_bench.peers.comparison import Lane, MeasuredGroup, Tried
from specserve_bench.peers.protocol import AUTO, DRAFT, LOOKUP
from specserve_bench.peers.systems import SPECSERVE, UNQUANTIZED, PeerChoice
from specserve_bench.report import markdown_table
from specserve_bench.results import extremes, extremes_over

IS_RATE = {figure.name: figure.is_rate for figure in FIGURES}
MEANINGS = {  # in the summary
    "TPOT ms": "TPOT, ms",
    "TTFT 300 ms": "TTFT, 300-token prompt, ms",
    "TTFT 1000 ms": "TTFT, 1,000-token prompt, ms",
    "TTFT 8000 ms": "TTFT, 8,000-token prompt, ms",
    "batch step ms": "{batch} concurrent requests, step time, ms",
    "batch tokens/s": "{batch} concurrent requests, tokens/s",
    "TPOT with drafting ms": "TPOT, ms",
    "tokens per step": "tokens per step",
}
DRAFTERS = {LOOKUP: "n-gram lookup", DRAFT: "draft model", AUTO: "auto"}
NOT_MEASURED = "not measured"
BETTER = {True: "higher is better", False: "lower is better"}


def group_result(
    group: MeasuredGroup, drafter: str | None, draft: str | None, costs: Mapping[str, Cost]
) -> list[dict[str, Any]]:
    """The figures of lanes that were measured in the same rounds."""
    names = {lane.case.name for lane in group.lanes}
    return [
        figure_result(figure, [lane for lane in group.lanes if lane.case.name == figure.case])
        | {"drafter": drafter, "draft": draft, "bound": bound(group.rates, costs.get(figure.name))}
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
    """The share of each system's plain text before it differs from ours."""
    plain = {
        lane.system.name: lane.rounds[-1]
        for lane in lanes
        if lane.case.name == "plain" and lane.rounds
    }
    if SPECSERVE not in plain:
        return {}
    shares = {name: agreement(done, plain[SPECSERVE]) for name, done in plain.items()}
    return {name: round(share, 3) for name, share in shares.items() if share is not None}


def sweep_result(
    tried: Iterable[Tried], labels: Mapping[Path | None, str] | None = None
) -> list[dict[str, Any]]:
    """`labels` are those of the draft models' folders."""
    return [
        {
            "system": t.system,
            "setting": t.choice.words(),
            "draft": draft_label(t.choice, labels or {}),
            "tpot_ms": t.tpot_ms and round(t.tpot_ms, 2),
            "ttft_ms": t.ttft_ms and round(t.ttft_ms, 1),
            "error": t.error,
        }
        for t in tried
    ]


def draft_label(choice: PeerChoice, labels: Mapping[Path | None, str]) -> str | None:
    folder = choice.drafting and choice.drafting.draft
    return labels.get(Path(folder)) if folder else None


def sweep_table(result: Mapping[str, Any]) -> str:
    rows = (
        [t["system"], t["setting"]]
        + ([t["error"]] if t["error"] else [f"{t['tpot_ms']:.1f}", f"{t['ttft_ms']:.0f}"])
        for t in result["sweep"]
    )
    return markdown_table(["system", "tried with", "TPOT ms", "TTFT ms"], rows)


def table(result: Mapping[str, Any]) -> str:
    """A row for each figure and drafter, a column for each system; then errors, one line each."""
    columns = split(result)
    systems = names_of(columns)
    head = ["figure", *systems, "bound", f"{SPECSERVE} / best peer"]
    head += [f"{SPECSERVE} / 16 bits"] if UNQUANTIZED in systems else []
    rows = []
    for column in columns:
        cells = [shown(column["systems"].get(name), column["drafter"]) for name in systems]
        row = [words(column, result), *cells, shown(column["bound"]) if column["bound"] else "-"]
        row.append(shown_ratio(column, "ratio"))
        rows.append(row + ([shown_ratio(column, "over_16_bits")] if UNQUANTIZED in systems else []))
    told = errors(columns)
    return "\n".join([markdown_table(head, rows), *([""] if told else []), *told])


def split(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures, each with one drafter; drafters in order, `auto` last.

    Results of older commits have one figure for the fastest setting of each system. Its cells name
    the drafter, so the figure becomes one for each drafter. `auto` was not measured then.
    """
    plain: list[dict[str, Any]] = []
    drafting: dict[str, list[dict[str, Any]]] = {kind: [] for kind in DRAFTERS}
    for figure in result["figures"]:
        parts = [dict(figure)] if "drafter" in figure else by_drafter(figure)
        for part in parts:
            (plain if part["drafter"] is None else drafting[part["drafter"]]).append(part)
    number_runs(drafting[LOOKUP])
    is_old = any("drafter" not in figure for figure in result["figures"])
    if is_old and drafting[LOOKUP] + drafting[DRAFT] and not drafting[AUTO]:
        names = dict.fromkeys(part["figure"] for kind in drafting.values() for part in kind)
        empty: dict[str, Any] = dict.fromkeys(("draft", "bound", "ratio"))
        empty |= {"systems": {}, "drafter": AUTO}
        drafting[AUTO] = [{"figure": name, **empty} for name in names]
    return plain + [part for parts in drafting.values() for part in parts]


def by_drafter(figure: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figure with the cells of each drafter, and ratios of two of these cells."""
    parts = []
    for kind in (None, LOOKUP, DRAFT):
        cells = {name: c for name, c in figure["systems"].items() if drafter(c) == kind}
        if kind is None:  # errors have no setting
            is_plain = all("error" in c or drafter(c) is None for c in figure["systems"].values())
            cells = cells if is_plain else {}
        ratios = {
            name: found if found and {SPECSERVE, found["peer"]} <= {*cells} else None
            for name in ("ratio", "over_16_bits")
            for found in [figure.get(name)]
        }
        draft = None if kind == LOOKUP else figure["draft"]
        if cells:
            parts.append({**figure, **ratios, "drafter": kind, "draft": draft, "systems": cells})
    return parts


def number_runs(parts: Sequence[dict[str, Any]]) -> None:
    """Number the figures that were measured several times with the same setting."""
    names = [part["figure"] for part in parts]
    for number, part in enumerate(parts):
        if names.count(part["figure"]) > 1:
            part["run"] = 1 + names[:number].count(part["figure"])


def names_of(columns: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for column in columns for name in column["systems"]))


def summary(result: Mapping[str, Any], more: Iterable[Sequence[str]] = ()) -> str:
    """A row for each time and drafter, and a column for each system.

    Cells are medians, with the best one bold. The last column divides ours by the best peer's.
    `more` are rows of other measurements.
    """
    columns, rows = split(result), []
    systems = names_of(columns)
    for column in columns:
        cells = column["systems"]
        medians = {n: c["median"] for n, c in cells.items() if "median" in c}
        is_failed = column["drafter"] is None and SPECSERVE not in medians
        if column["figure"] == "tokens per step" or is_failed:
            continue
        told = {n: f"{value:.4g}" for n, value in medians.items()}
        if len(medians) > 1:
            best = (max if IS_RATE[column["figure"]] else min)(medians, key=medians.__getitem__)
            told[best] = f"**{told[best]}**"
        told = {n: text + limit(cells[n], column["drafter"]) for n, text in told.items()}
        row = [words(column, result), *(told.get(n, NOT_MEASURED) for n in systems)]
        rows.append([*row, shown_ratio(column, "ratio")])
    return markdown_table(["", *systems, f"{SPECSERVE} / best peer"], [*rows, *more])


def caption(result: Mapping[str, Any]) -> str:
    """The machine, the commit and the settings of the tables."""
    engines = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    text = (
        f"M{measured(result['machine'])[1:]}. The engines are {engines}. They took "
        f"turns in {result['rounds']} rounds. Cells are medians. Rows with drafting name the "
        "drafter. Their cells add the limit of draft tokens per step that was fastest for the "
        "engine."
    )
    if "drafter" not in result["figures"][0]:
        text += (
            " The rounds measured only the fastest drafter of each engine, once for each draft "
            f'model. They measured `auto` not at all. Other cells are "{NOT_MEASURED}".'
        )
    return fill(text, 100, break_long_words=False, break_on_hyphens=False)


def sweep_summary(result: Mapping[str, Any]) -> str:
    """TPOT of each drafter and limit of draft tokens that was tried, before the rounds."""
    drafts = list(dict.fromkeys(f["draft"] for f in result["figures"] if f["draft"]))
    seen: dict[tuple[str, str], int] = {}
    rows: dict[tuple[str, str, int], dict[str, str]] = {}
    systems = list(dict.fromkeys(t["system"] for t in result["sweep"]))
    for tried in result["sweep"]:
        kind, tokens = drafter(tried), tokens_of(tried)
        if kind is None:
            continue
        key = tried["system"], tried["setting"]
        number = seen[key] = seen.get(key, -1) + 1
        draft = tried.get("draft") or (drafts[number] if kind == DRAFT and drafts else "")
        row = rows.setdefault((kind, draft, tokens), {})
        row[tried["system"]] = "error" if tried["error"] else f"{tried['tpot_ms']:.1f}"
    order = {kind: number for number, kind in enumerate(DRAFTERS)}
    lines = (
        [
            DRAFTERS[kind] + (f", {draft}" if draft else ""),
            str(tokens or "-"),
            *(row.get(name, "not tried") for name in systems),
        ]
        for (kind, draft, tokens), row in sorted(rows.items(), key=lambda r: sort_key(r[0], order))
    )
    return markdown_table(["drafter", "draft tokens", *(f"{n}, ms" for n in systems)], lines)


def sort_key(row: tuple[str, str, int], order: Mapping[str, int]) -> tuple[int, str, int]:
    kind, draft, tokens = row
    return order[kind], "" if draft.startswith("nearly") else draft, tokens


def drafter(cell: Mapping[str, Any]) -> str | None:
    """The drafter of a cell's setting; None without drafting."""
    _, _, name = str(cell.get("setting", "")).partition(", ")
    by = name.partition(" ")[0]
    return by if by in DRAFTERS else None


def tokens_of(cell: Mapping[str, Any]) -> int:
    """The limit of draft tokens in a cell's setting; 0 without one."""
    last = str(cell.get("setting", "")).rpartition(" ")[2]
    return int(last) if last.isdecimal() else 0


def limit(cell: Mapping[str, Any], kind: str | None) -> str:
    """The limit of draft tokens of a cell, and its drafter if the row has another one."""
    own = drafter(cell)
    if kind is None or own is None:
        return ""
    name = "" if own == kind else f" {DRAFTERS[own]}"
    tokens = tokens_of(cell)
    return f",{name} {tokens}" if tokens else ""


def words(column: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    kind, draft, run = column["drafter"], column["draft"], column.get("run")
    name = MEANINGS.get(column["figure"], column["figure"])
    parts = [name.format(batch=result.get("sizes", {}).get("batch", ""))]
    if kind is not None:
        detail = f" ({draft})" if draft else f", run {run}" if run else ""
        parts.insert(0, f"{DRAFTERS[kind]}{detail}")
    return f"{': '.join(parts)} ({BETTER[IS_RATE[column['figure']]]})"


def shown(value: Mapping[str, Any] | None, kind: str | None = None) -> str:
    if value is None:
        return NOT_MEASURED
    if "error" in value:
        return "none"
    return f"{value['median']:.4g} ({value['low']:.4g} to {value['high']:.4g}){limit(value, kind)}"


def shown_ratio(column: Mapping[str, Any], name: str) -> str:
    """The ratio of the medians that the table shows, and the extremes of rounds' own ratios."""
    found = column.get(name)
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
