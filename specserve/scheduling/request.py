"""A request, and one request's share of a step."""

from array import array

import msgspec

from specserve.memory import BlockTable
from specserve.sampling import Sampling
from specserve_drafters import Draft


class Request(msgspec.Struct, eq=False):
    """`token_ids` holds the prompt and the committed output; a guess never gets in here."""

    id: int
    token_ids: "array[int]"  # typecode "i"
    sampling: Sampling
    table: BlockTable  # the target's KV
    draft_table: BlockTable  # the draft model's; empty where none is used
    num_prompt: int = 0
    admitted_at: float = 0.0  # seconds, perf_counter; the first time, where it was preempted

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose KV stands in the pool."""
        return self.table.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.sampling.max_tokens - self.num_output

    @property
    def is_due(self) -> bool:
        """Exactly one known token is uncomputed: the request has a root, and may have a tree."""
        return self.num_computed == len(self.token_ids) - 1

    def release(self) -> None:
        """Give all blocks back; the KV has to be computed again."""
        self.table.clear()
        self.draft_table.clear()


class Work(msgspec.Struct, eq=False):
    """Tokens [start, end) of a request, then the nodes of its draft, go through together."""

    request: Request
    start: int
    end: int
    draft_limit: int = 0
    draft: Draft = Draft()

    @property
    def is_sampled(self) -> bool:
        """The last known token is among the rows: at least one new token follows."""
        return self.end == len(self.request.token_ids)

    @property
    def is_root(self) -> bool:
        return self.is_sampled and self.end - self.start == 1
