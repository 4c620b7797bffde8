"""A source of draft tokens that a request's grammar forces."""

from array import array
from collections.abc import Sequence
from typing import ClassVar

from specserve_drafters.base import DraftRequest, DraftSource
from specserve_drafters.candidates import Candidate, Rules
from specserve_drafters.trie import BaseTrie

SCORE = 1.0  # forced bytes are certain; calibration learns whether the tokens are
LEAST_VALUE = 0.02  # least value of a path that is continued


class GrammarSource(DraftSource):
    """Proposes the only text that a grammar allows: after the root, and after draft tokens of other
    sources.
    """

    name = "grammar"
    is_estimating: ClassVar[bool] = True
    needs_rules: ClassVar[bool] = True
    extends_paths: ClassVar[bool] = True

    def __init__(self) -> None:
        self.rules: dict[int, Rules] = {}

    def constrain(self, id: int, rules: Rules) -> None:
        self.rules[id] = rules

    def expected_accepted(self, id: int, text: "array[int]") -> float:
        rules = self.rules.get(id)
        return float(len(rules.forced(()))) if rules is not None else 0.0

    def candidates(self, items: Sequence[DraftRequest]) -> list[list[Candidate]]:
        return [self.after((), item) for item in items]

    def after(self, path: Sequence[int], item: DraftRequest) -> list[Candidate]:
        rules = self.rules.get(item.id)
        forced = [] if rules is None else rules.forced(path)[: max(0, item.limit - len(path))]
        return [Candidate(token, k, SCORE, self.name) for k, token in enumerate(forced)]

    def extend(self, trie: BaseTrie, item: DraftRequest, proposed: dict[str, int]) -> None:
        """Continue the paths of a request that were added and ended since the last call."""
        if item.id not in self.rules:
            return
        new = range(trie.num_continued + 1, len(trie) + 1)
        for node in new:
            if trie.values[node] >= LEAST_VALUE and not trie.children_of(node):
                found = self.after(trie.path(node), item)
                trie.merge(found, below=node)
                proposed[self.name] = proposed.get(self.name, 0) + len(found)
        trie.num_continued = len(trie)

    def forget(self, id: int) -> None:
        self.rules.pop(id, None)
