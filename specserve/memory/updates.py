"""KV that has to move before the next rows are computed: recorded on the host, done at a launch."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class KVUpdates(NamedTuple):
    """What a launch does to the arena before anything else: the moves in order, then the copies.

    moves   by model, [m, 2] int64  KV of a token, from slot to slot: block * block_size + offset
    copies  [c, 2]           int64  whole blocks, from block to block
    """

    moves: dict[str, NDArray[np.int64]]
    copies: NDArray[np.int64]

    def __bool__(self) -> bool:
        return bool(self.moves) or len(self.copies) > 0


class PendingUpdates:
    """Updates that no launch has taken yet.

    The next launch, of either model, moves the accepted nodes of the last step, and so before
    another request can write to their blocks. Copies are noted while a step is planned or drafted,
    which comes after the last step's moves.
    """

    def __init__(self) -> None:
        self.moves: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self.copies: list[tuple[int, int]] = []

    def move(self, model: str, slots: Iterable[tuple[int, int]]) -> None:
        assert not self.copies, "a move after a copy would be done before it"
        self.moves[model] += slots

    def copy(self, source: int, target: int) -> None:
        self.copies.append((source, target))

    def take(self) -> KVUpdates:
        """All pending updates, as arrays; the caller has to carry them out."""
        if not self.copies and not self.moves:
            return NONE
        moves = {model: pairs(slots) for model, slots in self.moves.items() if slots}
        updates = KVUpdates(moves, pairs(self.copies))
        self.moves.clear()
        self.copies.clear()
        return updates


def pairs(of: list[tuple[int, int]]) -> NDArray[np.int64]:
    return np.array(of, dtype=np.int64).reshape(-1, 2)


NONE = KVUpdates({}, pairs([]))
