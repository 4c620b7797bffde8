"""The recurrent state of a request: its blocks, and replays of accepted draft tokens."""

from collections.abc import Sequence
from typing import NamedTuple


class StateReplay(NamedTuple):
    """Accepted draft tokens of the target's last step, which advance a state.

    blocks       of the state
    places       of the kept inputs of these tokens, in order
    snapshot_at  the state after so many of them is copied; -1: no copy
    snapshot     blocks of the copy
    """

    blocks: Sequence[int]
    places: Sequence[int]
    snapshot_at: int = -1
    snapshot: Sequence[int] = ()


class RequestState:
    """The blocks of a request's recurrent state.

    After the pending updates, the state has the inputs of the table's `num_computed` tokens. Rows
    of known tokens advance it in their step. Accepted draft tokens advance it in the next launch.

    A checkpoint is a copy at the end of a full block of tokens, with that block's key. It is
    written before the last known token, where a lookup found KV without a checkpoint, at regular
    intervals, and at the last full block of the output.
    """

    def __init__(self, size: int = 0, interval: int = 0) -> None:
        """`size`: blocks of a state; 0 only in NO_STATE. `interval`: tokens; 0: none."""
        self.size, self.interval = size, interval
        self.blocks: list[int] = []
        self.snapshot: list[int] = []  # blocks to which the planned step copies the state
        self.snapshot_end = 0  # number of tokens whose inputs this copy has
        self.wanted: set[int] = set()  # numbers of blocks after which others need a checkpoint
        self.latest = b""  # key of the last checkpoint of output

    def take(self) -> list[int]:
        """Return all blocks, and forget them."""
        blocks = [*self.blocks, *self.snapshot]
        self.blocks, self.snapshot = [], []
        return blocks


NO_STATE = RequestState()  # of all tables of models without recurrent layers
