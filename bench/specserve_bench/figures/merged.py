"""What one tree of all sources brings: tokens a step, at as many guesses as a drafter verifies."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from specserve import LLM
from specserve.scheduling.cost import StepCosts
from specserve.scheduling.planner import ExplorationBudget
from specserve.speculation.adaptive_speculator import AdaptiveSpeculator
from specserve.speculation.verify import AcceptanceStats
from specserve_bench.local import Local
from specserve_bench.report import markdown_table, ratio_words
from specserve_bench.results import Load, ratio
from specserve_bench.workloads import Workload, workload
from specserve_drafters.tenants import PerTenant

LIMIT = 16  # guesses of a step, at most
# What the tree is compared with: the draft model with its own n-grams, also as deep as the tree.
OTHERS: dict[str, dict[str, Any]] = {
    "model:16": {"drafter": "model"},
    "model:16, 16 levels": {"drafter": "model", "set": {"drafter.options.max_depth": 16}},
}
PRICES = (0.15, 0.07, 0.04, 0.02, 0.01)  # of a guess, in steps: between them it is interpolated
NAMES = ("mixed", "agent")
ROUNDS, REQUESTS = 7, 16


class TreeMeans(NamedTuple):
    """Means over the verified steps of a round."""

    guesses: float
    tokens: float


class RowCosts(StepCosts):
    """A step takes `base` seconds, and `price` more for each of its rows."""

    def __init__(self, price: float, base: float = 1.0) -> None:
        super().__init__(1)
        self.edges, self.price, self.base = [*range(1, 2 * LIMIT)], price, base

    def seconds(
        self,
        rows: int,
        context: float,
        requests: int,
        is_hopeful: bool = False,
        attended: float | None = None,
    ) -> float:
        return self.base + self.price * rows

    def is_known(self, rows: int) -> bool:
        return True

    def observe(
        self,
        rows: int,
        context: float,
        requests: int,
        seconds: float,
        attended: float | None = None,
    ) -> None:
        pass


class EveryTurn(ExplorationBudget):
    """Guesses are made in every step, however long making them takes."""

    def is_due(self, id: int) -> bool:
        return True


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
    """The tree beside another drafter in the same rounds: at as many guesses, and with all."""
    base = [tree.tokens for tree in other]
    merged = [at(one.guesses, trees) for one, trees in zip(other, priced, strict=True)]
    return {
        "workload": name,
        "drafter": drafter,
        "guesses": [tree.guesses for tree in other],
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
    """What a round brought where a guess costs so much, if the drafter goes by costs."""
    llm.engine.reset_learned()
    guesses = llm.engine.speculator
    if isinstance(guesses, AdaptiveSpeculator) and guesses.draft_model is not None:
        guesses.planner.costs, model = RowCosts(price), guesses.draft_model
        # A draft model's levels take no time: so every one is run that may be of use.
        model.costs = model.first_costs = RowCosts(0.0, base=0.0)
        guesses.acceptance = PerTenant(asked_always)
    told = Local(llm, is_warm=True).run(asked, Load(concurrency=1)).speculation
    assert told is not None and told.steps, "an engine of this process tells of its steps"
    return TreeMeans(told.drafted / told.steps, told.tokens / told.steps)


def asked_always() -> AcceptanceStats:
    acceptance = AcceptanceStats()
    acceptance.benefits, acceptance.level_benefits = EveryTurn(), defaultdict(EveryTurn)
    return acceptance


def at(guesses: float, trees: Sequence[TreeMeans]) -> float:
    """Tokens a step at so many guesses, between trees of several sizes."""
    known = sorted(trees)
    return float(np.interp(guesses, [t.guesses for t in known], [t.tokens for t in known]))


def table(result: Mapping[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        means = [f"{np.mean(row[key]):.2f}" for key in ("guesses", "tokens", "merged_tokens")]
        found = [ratio_words(row[key]) for key in ("over", "over_at_same_limit")]
        rows.append([row["workload"], row["drafter"], *means, *found])
    head = ["workload", "beside", "guesses a step", "tokens a step", "merged, as many guesses"]
    return markdown_table([*head, "merged / it", f"merged, all of {LIMIT} / it"], rows)
