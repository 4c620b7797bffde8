"""Updates of the arena that the next launch runs: moves, stores, replays, copies and loads."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specserve.memory.states import StateReplay


class KVUpdates(NamedTuple):
    """Updates of the arena at the start of a launch, in this order: moves, stores, replays, copies,
    loads.

    moves    by model: (from slot, to slot) of a token's KV; slot = block * block_size + offset
    stores   (block, host block): an evicted block moves to the host tier
    copies   (from block, to block) of whole blocks
    loads    (host block, block): a block comes back from the host tier
    replays  accepted draft tokens that recurrent states take up
    """

    moves: dict[str, list[tuple[int, int]]]
    stores: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    loads: list[tuple[int, int]]
    replays: Sequence[StateReplay] = ()

    def __bool__(self) -> bool:
        return any(self)


class PendingUpdates:
    """Updates for the next launch.

    The next launch of either model moves the accepted nodes of the last step before another
    request can write to their blocks. It also replays them, so that a copy of a state has them.
    The other updates are added while a step is planned or drafted, after the moves and replays of
    the last step.

    Evicted blocks are stored before replays, copies and loads overwrite them. A checkpoint that a
    pending replay writes is not stored. Loads come last: a block that
    a copy reads or writes may become free, and then be the target of a load. No copy reads a block
    that is loaded in the same launch, because requests find it later.
    """

    def __init__(self) -> None:
        self.moves: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self.stores: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.loads: list[tuple[int, int]] = []
        self.replays: list[StateReplay] = []

    def __bool__(self) -> bool:
        others = self.stores, self.copies, self.loads, self.replays
        return any((any(self.moves.values()), *others))

    def move(self, model: str, slots: Iterable[tuple[int, int]]) -> None:
        assert not self.copies, "a launch would run this move before the earlier copies"
        self.moves[model] += slots

    def replay(self, replay: StateReplay) -> None:
        assert not self.copies, "a launch would run this replay before the earlier copies"
        self.replays.append(replay)

    def copy(self, source: int, target: int) -> None:
        self.copies.append((source, target))

    def writes_checkpoint(self, block: int) -> bool:
        """Return whether a pending replay writes the checkpoint that this block is part of."""
        return any(block in replay.snapshot for replay in self.replays)

    def take(self) -> KVUpdates:
        """Return and clear all pending updates; the caller must run them."""
        moves = {model: slots for model, slots in self.moves.items() if slots}
        updates = KVUpdates(moves, self.stores, self.copies, self.loads, self.replays)
        self.moves, self.stores, self.copies, self.loads = defaultdict(list), [], [], []
        self.replays = []
        return updates
