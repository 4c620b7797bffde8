"""A request, and one request's share of a step."""

from array import array

import msgspec

from specserve.exchange.sampling_params import Sampling
from specserve.memory import BlockTable
from specserve_drafters import Draft


class Request(msgspec.Struct, eq=False):
    """`token_ids` holds the prompt and the committed output; a guess never gets in here."""

    id: int
    token_ids: "array[int]"  # typecode "i"
    sampling: Sampling
    table: BlockTable  # the target's KV
    draft_table: BlockTable  # the draft model's; empty where none is used
    num_prompt: int = 0
    num_cached: int = 0  # prompt tokens that were found when it was first admitted
    admitted_at: float = 0.0  # seconds, perf_counter; the first time, where it was preempted
    # Where several choices have one prompt, the first computes it, and the others wait for that.
    first: "Request | None" = None
    behind: "list[Request]" = []  # those who wait for this one

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first, and who has to go last: by priority, then by arrival."""
        return self.sampling.priority, self.id

    @property
    def is_behind(self) -> bool:
        return self.first is not None and self in self.first.behind

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

    @property
    def is_computing(self) -> bool:
        """More than one known token is uncomputed."""
        return self.num_computed < len(self.token_ids) - 1

    @property
    def draft_gap(self) -> int:
        """Known tokens that the draft model has not computed."""
        return len(self.token_ids) - self.draft_table.num_computed

    def is_ahead_of(self, other: "Request") -> bool:
        """Whether it is computing a block that the other could then have, and at least as soon."""
        table, place = self.table, self.table.num_published
        if self.sampling.priority > other.sampling.priority or not table.is_publishing:
            return False
        key = table.key(self.token_ids, place)
        return key is not None and key == other.table.key(other.token_ids, place)

    def begin(self) -> None:
        """Take what is cached of its known tokens, unless another choice has brought them along."""
        if not self.table.blocks:
            self.table.match(self.token_ids, self.table.pool.num_available)

    def begin_draft(self, spare: int) -> None:
        """The same for the draft model's KV, which may be behind at any time."""
        table, first = self.draft_table, self.first
        table.trim()
        shared = min(self.num_prompt, len(self.token_ids) - 1)
        is_there = first is not None and first.draft_table.num_computed >= shared
        if first is not None and is_there and not table.blocks:
            table.fork(first.draft_table, shared)
        else:
            table.match(self.token_ids, spare)

    def share_prompt(self) -> None:
        """Now that the prompt is computed: the other choices begin with it, but for its last token,
        after which each has its own say.
        """
        for other in self.behind:
            other.table.fork(self.table, self.num_prompt - 1)
        self.behind = []

    def leave(self) -> None:
        """It ends: nobody waits for it, and it for nobody. Where it has not computed the prompt,
        the next choice does.
        """
        if self.first is not None and self.is_behind:
            self.first.behind.remove(self)
        if self.behind:
            heir, *others = self.behind
            heir.first, heir.behind, self.behind = None, others, []
            for other in others:
                other.first = heir

    def publish(self) -> None:
        """Let others find the blocks that are full of committed tokens."""
        self.table.publish(self.token_ids)
        self.draft_table.publish(self.token_ids)

    def release(self) -> None:
        """Give all blocks back; the KV has to be computed again."""
        self.table.clear()
        self.draft_table.clear()


class ScheduledRequest(msgspec.Struct, eq=False):
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
