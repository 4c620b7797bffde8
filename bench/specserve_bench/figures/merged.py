"""One tree of all draft sources against a single drafter: tokens per step, equal draft tokens."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from specserve import LLM
from specserve.speculation.adaptive_speculator import AdaptiveSpeculator
from specserve.speculation.constants import FINE
from specserve.speculation.costs import StepCosts
from specserve_bench.local import Local, reset_learned
from specserve_bench.report import markdown_table, ratio_words
from specserve_bench.results import Load, ratio
from specserve_bench.workloads import Workload, workload
from specserve_kernels.cpu import drafting

LIMIT = 16  # maximum draft tokens per step
# The other drafters: the draft model with its own n-grams, also as deep as the tree.
OTHERS: dict[str, dict[str, Any]] = {
    "model:16": {"drafter": "model"},
    "model:16, 16 levels": {"drafter": "model", "set": {"drafter.options.max_depth": 16}},
}
PRICES = (0.15, 0.07, 0.04, 0.02, 0.01)  # cost of a draft token, as a share of a step
NAMES = ("mixed", "agent")
ROUNDS, REQUESTS = 7, 16
EVERY_TURN = 100.0  # share of time that trials may lose: they are due in every step


class TreeMeans(NamedTuple):
    """Means over the verified steps of a round."""

    draft_tokens: float
    tokens: float


class RowCosts(StepCosts):
    """A step takes `base` seconds, and `price` more for each of its rows."""

    def __init__(self, price: float, base: float = 1.0) -> None:
        super().__init__(1)
        self.edges = [*range(1, 2 * LIMIT)]
        by_rows = array("d", [base + price * rows for rows in range(2 * LIMIT)])
        edges, known = array("q", self.edges), array("b", [1] * len(self.edges))
        at, by_edge, few = by_rows.buffer_info()[0], by_rows[1:], self.native.few
        addresses = edges.buffer_info()[0], known.buffer_info()[0], few
        sizes = len(by_rows) - 1, len(edges), self.native.num_few, FINE
        added = 0.0, 0.0, 0.0, 1.0
        self.columns = by_rows, by_edge, edges, known  # they live as long
        given = at, at, *addresses, *sizes, *added, by_edge.buffer_info()[0]
        self.use(drafting.CostColumns(*given))

    def is_known(self, rows: int) -> bool:
        return True

    def is_stale(self, rows: int) -> bool:
        return False

    def observe(
        self,
        rows: int,
        context: float,
        requests: int,
        seconds: float,
        attended: float | None = None,
    ) -> None:
        pass


def measure() -> dict[str, Any]:
    """On the demo pair, one request at a time. A round is another seed of the workload."""
    tree = load({"drafter": "auto"})
    others = {name: load(settings, tree.weights) for name, settings in OTHERS.items()}
    rows = [row for name in NAMES for row in rows_of(tree, others, name)]
    return {"requests": REQUESTS, "limit": LIMIT, "rows": rows}


def load(settings: dict[str, Any], weights: Any = ()) -> LLM:
    memory = {"speculation.max_nodes": LIMIT, "memory.kv_bytes": 1 << 28}
    asked = settings | {"set": memory | settings.get("set", {})}
    return LLM(**asked, progress=False, weights=weights)


def rows_of(tree: LLM, others: dict[str, LLM], name: str) -> list[dict[str, Any]]:
    asked = [workload(name, REQUESTS, seed) for seed in range(ROUNDS)]
    priced = [[one_round(tree, a, price) for price in PRICES] for a in asked]
    full = [one_round(tree, a, 0.0) for a in asked]
    return [
        row(name, drafter, [one_round(llm, a) for a in asked], priced, full)
        for drafter, llm in others.items()
    ]


def row(
    name: str,
    drafter: str,
    other: Sequence[TreeMeans],
    priced: Sequence[Sequence[TreeMeans]],
    full: Sequence[TreeMeans],
) -> dict[str, Any]:
    """The tree against another drafter in the same rounds: with as many draft tokens, and all."""
    base = [tree.tokens for tree in other]
    merged = [at(one.draft_tokens, trees) for one, trees in zip(other, priced, strict=True)]
    return {
        "workload": name,
        "drafter": drafter,
        "draft_tokens": [tree.draft_tokens for tree in other],
        "tokens": base,
        "merged_tokens": merged,
        "merged_by_price": dict(
            zip(map(str, PRICES), np.mean(priced, axis=0).tolist(), strict=True)
        ),
        "merged_full": np.mean(full, axis=0).tolist(),
        "over": msgspec.to_builtins(ratio(merged, base)),
        "over_at_same_limit": msgspec.to_builtins(ratio([t.tokens for t in full], base)),
    }


def one_round(llm: LLM, asked: Workload, price: float = 0.0) -> TreeMeans:
    """A round's means. `price` is the cost of a draft token for a drafter that uses costs."""
    reset_learned(llm.engine)
    speculator = llm.engine.speculator
    if isinstance(speculator, AdaptiveSpeculator) and speculator.draft_model is not None:
        speculator.learn_anew(exploration=EVERY_TURN)
        speculator.planner.costs, model = RowCosts(price), speculator.draft_model
        # Levels of the draft model cost nothing here, so all of them run.
        model.costs = model.first_costs = RowCosts(0.0, base=0.0)
    told = Local(llm, is_warm=True).run(asked, Load(concurrency=1)).speculation
    assert told is not None and told.steps, "an engine of this process tells of its steps"
    return TreeMeans(told.drafted / told.steps, told.tokens / told.steps)


def at(draft_tokens: float, trees: Sequence[TreeMeans]) -> float:
    """Tokens per step for a number of draft tokens, interpolated between tree sizes."""
    known = sorted(trees)
    return float(
        np.interp(draft_tokens, [t.draft_tokens for t in known], [t.tokens for t in known])
    )


def table(result: Mapping[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        means = [f"{np.mean(row[key]):.2f}" for key in ("draft_tokens", "tokens", "merged_tokens")]
        found = [ratio_words(row[key]) for key in ("over", "over_at_same_limit")]
        rows.append([row["workload"], row["drafter"], *means, *found])
    head = [
        "workload",
        "drafter",
        "draft tokens per step",
        "tokens per step",
        "merged: tokens per step",
    ]
    return markdown_table([*head, "merged / drafter", f"merged with all {LIMIT} / drafter"], rows)
