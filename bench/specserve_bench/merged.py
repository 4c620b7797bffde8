"""What one tree of all sources brings: tokens a step, at as many guesses as a drafter verifies."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from specserve import LLM
from specserve.engine.planned_guesses import PlannedGuesses
from specserve.scheduling.cost import StepCosts
from specserve_bench.local import Local
from specserve_bench.report import ratio_words
from specserve_bench.results import Load, Ratio, ratio
from specserve_bench.workloads import Workload, workload

OTHER = "model", 16  # the drafter that the tree is compared with, and its most guesses
SIZES = (4, 8, 12, 16, 20)  # most guesses of the tree: between them it is interpolated
NAMES = ("mixed", "agent")
ROUNDS, REQUESTS = 7, 16


class Tree(NamedTuple):
    """Means over the verified steps of a round."""

    guesses: float
    tokens: float


class SameCosts(StepCosts):
    """Every step takes as long: so as many guesses are verified as the limit allows."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1)
        self.same = seconds

    def seconds(self, rows: int, context: int, requests: int, is_hopeful: bool = False) -> float:
        return self.same

    def is_known(self, rows: int) -> bool:
        return True

    def observe(self, rows: int, context: int, requests: int, seconds: float) -> None:
        pass


def merged_figures() -> dict[str, Any]:
    """On the demo pair, one request at a time. A round is another seed of the workload."""
    llms = load()
    rows = [row(llms, name) for name in NAMES]
    print(table(rows))
    return {"drafter": ":".join(map(str, OTHER)), "requests": REQUESTS, "rows": rows}


def load() -> dict[tuple[str, int], LLM]:
    llms: dict[tuple[str, int], LLM] = {}
    for drafter, size in (OTHER, *(("auto", size) for size in SIZES)):
        settings = {"speculation.max_nodes": size, "memory.kv_bytes": 1 << 28}
        known = llms[OTHER].weights if llms else ()
        llms[drafter, size] = LLM(drafter=drafter, set=settings, progress=False, weights=known)
    return llms


def row(llms: dict[tuple[str, int], LLM], name: str) -> dict[str, Any]:
    asked = [workload(name, REQUESTS, seed) for seed in range(ROUNDS)]
    other = [one_round(llms[OTHER], a) for a in asked]
    sizes = [[one_round(llms["auto", size], a) for size in SIZES] for a in asked]
    merged = [at(tree.guesses, trees) for tree, trees in zip(other, sizes, strict=True)]
    full = [trees[SIZES.index(OTHER[1])].tokens for trees in sizes]
    base = [tree.tokens for tree in other]
    return {
        "workload": name,
        "guesses": [tree.guesses for tree in other],
        "tokens": base,
        "merged_tokens": merged,
        "merged_by_size": dict(zip(map(str, SIZES), np.mean(sizes, axis=0).tolist(), strict=True)),
        "over": msgspec.to_builtins(ratio(merged, base)),
        "over_at_same_limit": msgspec.to_builtins(ratio(full, base)),
    }


def one_round(llm: LLM, asked: Workload) -> Tree:
    llm.engine.reset_learned()
    guesses = llm.engine.guesses
    if isinstance(guesses, PlannedGuesses) and guesses.draft_model is not None:
        # A second is so much longer than a level that every level is run that may be of use.
        guesses.planner.costs, guesses.draft_model.costs = SameCosts(1.0), SameCosts(0.0)
    told = Local(llm, is_warm=True).run(asked, Load(concurrency=1)).speculation
    assert told is not None and told.steps, "an engine of this process tells of its steps"
    return Tree(told.drafted / told.steps, told.tokens / told.steps)


def at(guesses: float, trees: Sequence[Tree]) -> float:
    """Tokens a step at so many guesses, between trees of several sizes."""
    known = sorted(trees)
    return float(np.interp(guesses, [t.guesses for t in known], [t.tokens for t in known]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown, as in docs/bench.md."""
    name, limit = ":".join(map(str, OTHER)), OTHER[1]
    head = ["workload", f"guesses a step, {name}", "its tokens a step", "merged, as many guesses"]
    head += ["merged / it", f"at most {limit} each: merged / it"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        means = [f"{np.mean(row[key]):.2f}" for key in ("guesses", "tokens", "merged_tokens")]
        found = [msgspec.convert(row[key], Ratio) for key in ("over", "over_at_same_limit")]
        lines.append([row["workload"], *means, *map(ratio_words, found)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
