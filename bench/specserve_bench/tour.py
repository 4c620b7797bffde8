"""Draws the pictures of docs/tour.md from a recorded request, and the picture of the architecture.

python -m specserve_bench.tour docs/pictures          record a request, then draw
python -m specserve_bench.tour docs/pictures --draw   draw the kept record
"""

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from specserve import LLM
from specserve.api.watch import VISIBLE
from specserve.errors import ConfigError
from specserve_bench.demo.held_out import questions
from specserve_bench.machine import add_allow_dirty, exit_if_dirty
from specserve_bench.tour_record import (
    Node,
    Recorded,
    RecordedRun,
    Tour,
    cost,
    numbers,
    rates,
    record,
)

try:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, Rectangle
except ImportError as e:
    raise ConfigError("pictures need matplotlib: pip install 'specserve[bench]'") from e

INK, QUIET, LINE, RAISED, ACCENT = "#1b1e23", "#5a6068", "#c3c8cf", "#f0f1f4", "#0b5fc2"
FACES = "#bfe3c6", "#c3dbfb", "#f3d9ae", "#e6cdf5", "#f7ccd6", "#c5e7e9"  # as on the page at /
EDGES = "#2c7a43", "#0b5fc2", "#8a5a0b", "#7a35a8", "#b3264c", "#1d7479"
STYLE: Any = {  # the SVG keeps texts as texts, in the reader's fonts
    "svg.fonttype": "none",
    "svg.hashsalt": "specserve",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "text.parse_math": False,
}
MONO = ["DejaVu Sans Mono", "monospace"]


def draw(tour: Tour, folder: Path, kind: str = "svg") -> list[Path]:
    """Write all pictures to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with rc_context(STYLE):
        for name, picture in PICTURES.items():
            files.append(folder / f"{name}.{kind}")
            metadata = {"Date": None} if kind == "svg" else None
            picture(tour).savefig(files[-1], dpi=110, facecolor="white", metadata=metadata)
    return files


def canvas(width: float, height: float) -> tuple[Figure, Any]:
    """Return an empty picture. Its unit is a character in x and a row in y, from the upper left."""
    figure = Figure(figsize=(width * 0.068, height * 0.24))  # inches of a letter, and of a row
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    return figure, ax


def visible(text: str) -> str:
    return text.translate(VISIBLE) or "∅"


def box(ax: Any, x: float, y: float, text: str, **style: Any) -> float:
    """Draw a token, and return the x behind it."""
    width = len(text) + 1.0
    look: dict[str, Any] = {"facecolor": "white", "edgecolor": LINE, "linewidth": 0.8} | style
    bold, ink = look.pop("bold", False), look.pop("ink", INK)
    ax.add_patch(Rectangle((x, y - 0.4), width, 0.8, zorder=2, **look))
    weight = "bold" if bold else "normal"
    place: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 3}
    ax.text(x + width / 2, y, text, family=MONO, weight=weight, color=ink, **place)
    return x + width


def note(ax: Any, x: float, y: float, text: str, **style: Any) -> None:
    ax.text(x, y, text, **{"va": "center", "color": QUIET} | style)


def look(sources: int, is_accepted: bool) -> dict[str, Any]:
    """Return a token's style: the first source gives the face, the last one the edge."""
    if not sources:
        return {}
    first, last = (sources & -sources).bit_length() - 1, sources.bit_length() - 1
    if not is_accepted:
        return {"facecolor": RAISED, "edgecolor": FACES[first % len(FACES)], "ink": QUIET}
    edge = EDGES[last % len(EDGES)]
    return {"facecolor": FACES[first % len(FACES)], "edgecolor": edge, "linewidth": 1.4}


def legend(ax: Any, y: float, tour: Tour, used: Sequence[int]) -> None:
    x = 1.0
    for bits in sorted({*used}):
        names = [name for i, name in enumerate(tour.sources) if bits >> i & 1]
        x = box(ax, x, y, " and ".join(names) or "target model only", **look(bits, True)) + 1
    box(ax, x, y, "rejected", **look(1, False))


def blocks(tour: Tour) -> Figure:
    size = tour.block_size
    rows = [tour.prompt[at : at + size] for at in range(0, len(tour.prompt), size)]
    width = max(sum(len(visible(text)) + 1 for text in row) for row in rows) + 34
    figure, ax = canvas(width, 1.3 * len(rows) + 1.6)
    for place, row in enumerate(rows):
        y, is_cached = 0.9 + 1.3 * place, place * size < tour.num_cached
        state = "in the prefix cache" if is_cached else "computed"
        note(ax, 1, y, f"block {tour.blocks[place]}", color=INK, weight="bold")
        note(ax, 11, y, state)
        x = 32.0
        for text in row:
            face = FACES[0] if is_cached else "white"
            x = box(ax, x, y, visible(text), facecolor=face)
        if free := size - len(row):
            note(ax, x + 1, y, f"{free} free slots")
    note(ax, 1, 1.3 * len(rows) + 0.9, "␣ is a space, ↵ is a line break; each <|…|> is one token")
    return figure


def children(nodes: Sequence[Node]) -> list[list[int]]:
    """List the children of the root and of each node."""
    found: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
    for number, node in enumerate(nodes, 1):
        found[node.parent].append(number)
    return found


def tree(tour: Tour) -> Figure:
    step = tour.drafted.steps[tour.shown]
    known = [token for s in tour.drafted.steps[: tour.shown] for token in s.texts]
    below, texts = children(step.nodes), [known[-1] if known else tour.prompt[-1]]
    texts += [node.text for node in step.nodes]
    accepted, at, lines = {0, *step.accepted}, dict[int, tuple[int, int]](), 0

    def lay(node: int, depth: int) -> None:
        nonlocal lines
        at[node] = depth, lines
        for number, child in enumerate(sorted(below[node], key=lambda n: n not in accepted)):
            lines += number > 0
            lay(child, depth + 1)

    lay(0, 0)
    deepest = max(depth for depth, _ in at.values())
    widths = [
        max(6, *(len(visible(texts[n])) + 1 for n, (d, _) in at.items() if d == depth)) + 3
        for depth in range(deepest + 1)
    ]
    left = [1.0 + sum(widths[:depth]) for depth in range(deepest + 1)]
    bonus = f"{visible(step.texts[-1])} bonus"
    last = at[step.accepted[-1] if step.accepted else 0]
    last_x = left[last[0]] + widths[last[0]] if last[0] < deepest else left[-1] + widths[-1]
    end = max(left[-1] + widths[-1], last_x + len(bonus) + 2)
    figure, ax = canvas(end + 1, 2 * lines + 5.2)

    def y_of(node: int) -> float:
        return 1.0 + 2 * at[node][1]

    ends = dict[int, float]()
    for node, (depth, _) in at.items():
        sources = step.nodes[node - 1].sources if node else 0
        style = look(sources, node in accepted) if node else {"facecolor": INK, "ink": "white"}
        x = box(ax, left[depth], y_of(node), visible(texts[node]), bold=node in accepted, **style)
        ends[node] = x
        if node:
            p = f"{node}: {100 * step.nodes[node - 1].p:.0f} %"
            note(ax, left[depth], y_of(node) + 0.75, p, fontsize=7)
    for number, each in enumerate(step.nodes, 1):
        x, bold = left[at[number][0]], number in accepted
        middle = x - 1.5
        path = [ends[each.parent], middle, middle, x]
        ys = [y_of(each.parent), y_of(each.parent), y_of(number), y_of(number)]
        color = EDGES[each.sources.bit_length() - 1] if bold else LINE
        ax.plot(path, ys, color=color, linewidth=2 if bold else 1, zorder=1 + bold)
    node = step.accepted[-1] if step.accepted else 0
    x, y = ends[node], y_of(node)
    beyond = below[node]  # rejected draft tokens need the space
    y_bonus = y if not beyond else 1.0 + 2 * (lines + 1)
    ax.plot([x, last_x - 1.5, last_x - 1.5, last_x], [y, y, y_bonus, y_bonus], color=INK, lw=2)
    box(ax, last_x, y_bonus, bonus, bold=True, edgecolor=INK, linewidth=1.4)
    legend(ax, 2 * lines + 3.4, tour, [node.sources for node in step.nodes])
    words = "k: p % is draft token k and the probability of its whole path; bold: accepted"
    note(ax, 1, 2 * lines + 4.5, words)
    return figure


def seen(nodes: Sequence[Node]) -> list[set[int]]:
    """Return the nodes that the root and each draft token attend to."""
    found = [{0}]
    for number, node in enumerate(nodes, 1):
        found.append(found[node.parent] | {number})
    return found


def mask(tour: Tour) -> Figure:
    step = tour.drafted.steps[tour.shown]
    texts = ["root", *(visible(node.text) for node in step.nodes)]
    wide, high = max(map(len, texts)) + 6, len(texts)
    known = len(tour.prompt) + sum(len(s.tokens) for s in tour.drafted.steps[: tour.shown]) - 1
    figure, ax = canvas(wide + 3.2 * high + 44, high + 3)
    x0 = wide + 20.0
    note(ax, wide + 10, 1, f"{known} earlier tokens", ha="center", color=INK)
    for row, sees in enumerate(seen(step.nodes)):
        y = 2.3 + row
        is_accepted = row == 0 or row in step.accepted
        weight = "bold" if is_accepted else "normal"
        note(ax, wide - 1, y, f"{texts[row]}  {row}", ha="right", family=MONO, weight=weight)
        ax.add_patch(Rectangle((wide, y - 0.42), 19, 0.84, facecolor=FACES[1]))
        for column in range(high):
            face = (INK if column == row else EDGES[1]) if column in sees else RAISED
            ax.add_patch(Rectangle((x0 + 3.2 * column, y - 0.42), 2.9, 0.84, facecolor=face))
            if row == 0:
                place = x0 + 3.2 * column + 1.45
                note(ax, place, 1.3, str(column), ha="center", family=MONO)
    note(ax, x0 + 3.2 * high + 1, 2.3, "blue, black: attends")
    note(ax, x0 + 3.2 * high + 1, 3.3, "grey: hidden")
    return figure


def costs(tour: Tour) -> Figure:
    step = tour.drafted.steps[tour.shown]
    figure = Figure(figsize=(7.4, 2.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = [*range(1, 65)]  # rows on the x axis
    left.step(rows, [cost(step, n) for n in rows], where="mid", color=ACCENT)
    used = 1 + len(step.nodes)
    left.plot([used], [cost(step, used)], "o", color=INK)
    left.annotate(f"this step: {used} rows", (used, cost(step, used)), (6, -16), **AWAY)
    label(left, "Cost of one target forward", "rows", "ms")
    rate = rates(step)
    right.plot(range(len(rate)), rate, color=ACCENT, drawstyle="steps-mid")
    right.plot([len(step.nodes)], [rate[len(step.nodes)]], "o", color=INK)
    right.annotate(
        f"{len(step.nodes)} draft tokens", (len(step.nodes), rate[used - 1]), (4, -34), **AWAY
    )
    label(right, "Expected output", "verified draft tokens, likeliest first", "tokens per second")
    return figure


AWAY: dict[str, Any] = {"textcoords": "offset points"}


def label(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize=9)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.set_ylim(bottom=0)
    ax.spines[["top", "right"]].set_visible(False)


def timeline(tour: Tour) -> Figure:
    figure = Figure(figsize=(7.4, 2.9), layout="constrained")
    ax = figure.subplots()
    lanes: list[tuple[str, RecordedRun]] = [
        ("with drafting", tour.drafted),
        ("without", tour.plain),
    ]
    for lane, (_, run) in enumerate(lanes):
        started = 0.0
        for number, step in enumerate(run.steps):
            face = FACES[1] if number else RAISED
            ax.barh(lane, step.ms, 0.5, started, color=face, edgecolor="white", linewidth=1)
            tokens(ax, started + step.ms / 2, lane, number, step)
            started += step.ms
        word = "step" if len(run.steps) == 1 else "steps"
        ax.text(started, lane, f"  {len(run.steps)} {word}, {started:.0f} ms", va="center")
    ax.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    ax.set_ylim(len(lanes) - 0.5, -0.6)
    ax.set_xlim(0, max(run.total_ms for _, run in lanes) * 1.18)
    ax.set_xlabel("ms since the request began; grey: prompt step; number: new tokens of the step")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return figure


def tokens(ax: Any, x: float, lane: int, number: int, step: Recorded) -> None:
    """Write the number of tokens, and their text if there are several."""
    ax.text(x, lane, str(len(step.tokens)), ha="center", va="center", weight="bold")
    if len(step.tokens) > 1:
        y = lane + (0.42 if number % 2 else -0.36)
        ax.text(x, y, visible(step.text), ha="center", family=MONO, fontsize=6.5)


PARTS = (  # x, y, width, height, name, lines
    (1, 1, 32, 4.6, "Template processes", ("render chat templates", "within a time limit")),
    (
        38,
        1,
        32,
        4.6,
        "HTTP process",
        ("API, tokenizer, streams;", "no model, no torch"),
    ),
    (
        75,
        1,
        32,
        4.6,
        "Grammar process",
        ("compiles schemas and regexes", "within time and memory limits"),
    ),
    (1, 8.4, 106, 14.4, "Engine process", ()),
    (3, 10.6, 31, 4.6, "Scheduler", ("rows and blocks of each", "request in a step")),
    (
        38,
        10.6,
        32,
        4.6,
        "Drafters",
        ("n-grams, draft model, grammar,", "your own: one tree per request"),
    ),
    (
        74,
        10.6,
        31,
        4.6,
        "Planner",
        ("chooses the draft tokens to", "verify, by probability and cost"),
    ),
    (3, 17.2, 31, 4.6, "Pool", ("KV blocks, prefix cache,", "copies and moves")),
    (
        38,
        17.2,
        32,
        4.6,
        "Target forward",
        ("all rows at once: prompts,", "roots and draft trees"),
    ),
    (
        74,
        17.2,
        31,
        4.6,
        "Verification",
        ("follows the target's tokens,", "then commits them"),
    ),
    (
        1,
        25,
        106,
        3.4,
        "Kernels",
        ("one interface, three builds: CPU (C++), GPU (CUDA, Triton), reference (torch)",),
    ),
)
ARROWS = (  # from, to, words
    ((38, 3.3), (33, 3.3), ""),
    ((70, 3.3), (75, 3.3), ""),
    ((48, 5.6), (48, 8.4), "tokens"),
    ((60, 8.4), (60, 5.6), "new tokens"),
    ((34, 12.9), (38, 12.9), ""),
    ((70, 12.9), (74, 12.9), ""),
    ((89, 15.2), (58, 17.2), ""),
    ((38, 19.5), (34, 19.5), ""),
    ((70, 19.5), (74, 19.5), ""),
    ((54, 22.8), (54, 25), ""),
)


def architecture(tour: Tour) -> Figure:
    figure, ax = canvas(108, 29.4)
    for x, y, width, height, name, lines in PARTS:
        face = RAISED if not lines else FACES[0] if y == 1 else FACES[1]
        face = FACES[2] if name == "Kernels" else face
        style: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.5", "edgecolor": LINE}
        ax.add_patch(FancyBboxPatch((x, y), width, height, facecolor=face, zorder=1, **style))
        note(ax, x + 1.5, y + 1, name, color=INK, weight="bold", fontsize=9)
        for number, line in enumerate(lines):
            note(ax, x + 1.5, y + 2.3 + 1.1 * number, line, color=INK)
    for start, end, words in ARROWS:
        ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": QUIET}, zorder=2)
        note(ax, start[0] + 1, (start[1] + end[1]) / 2, words)
    return figure


PICTURES: dict[str, Callable[[Tour], Figure]] = {
    "tour-blocks": blocks,
    "tour-tree": tree,
    "tour-mask": mask,
    "tour-costs": costs,
    "tour-timeline": timeline,
    "architecture": architecture,
}


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m specserve_bench.tour", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the pictures")
    parser.add_argument(
        "--record", type=Path, default=Path("bench/results/tour.json"), help="default: %(default)s"
    )
    parser.add_argument("--draw", action="store_true", help="only draw the kept record")
    add_allow_dirty(parser)
    args = parser.parse_args(argv)
    if not args.draw:
        exit_if_dirty(str(args.record), args.allow_dirty)
        warm = [q.question for q in questions()[:: len(questions()) // 24]]
        with LLM(set={"model.demo_compute": "qwen3-0.6b"}) as llm:
            asked = "What does json.dump do?", "And what does json.dumps do?"
            tour = record(llm, asked, warm)
        args.record.write_bytes(msgspec.json.format(msgspec.json.encode(tour), indent=1) + b"\n")
    tour = msgspec.json.decode(args.record.read_bytes(), type=Tour)
    print(*draw(tour, args.folder), sep="\n")
    print("bold numbers of the page:", *numbers(tour))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
