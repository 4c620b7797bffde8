"""A request, and its share of a step."""

import logging
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import msgspec

from specserve.errors import WEIGHTS
from specserve.exchange.messages import AdapterRef, Caller, Stats, TokenLogprobs
from specserve.exchange.sampling_params import Sampling
from specserve.memory.blocks import BlockTable
from specserve.memory.checkpoints import match_checkpoint, publish_snapshot
from specserve.scheduling.grammar_state import GrammarState
from specserve.scheduling.processors import LogitsProcessors
from specserve.scheduling.text_state import TextState
from specserve_drafters import Draft, DraftRequest
from specserve_kernels import NOT_FINITE

log = logging.getLogger("specserve")

NOTHING_LEFT = (
    "the grammar allows no next token. Relax the grammar, or remove other parameters that forbid "
    "tokens"
)
ALL_RULED_OUT = (
    "no token is left: allowed_token_ids, bad_words, logit_bias, min_tokens and logits processors "
    "together forbid all tokens. Relax one of them"
)
LOGITS_NOT_FINITE = (
    "the model's logits are not finite: its checkpoint or its LoRA adapter is damaged, or its "
    "numbers overflow. Replace it, or set model.dtype to fp32"
)


class Request(msgspec.Struct, eq=False):
    """One prompt and its output. `token_ids` holds prompt and committed output, never draft
    tokens.
    """

    id: int
    token_ids: "array[int]"  # typecode "i"
    sampling: Sampling
    table: BlockTable  # the target's KV
    draft_table: BlockTable  # the draft model's KV; empty without a draft model
    caller: Caller
    num_prompt: int = 0  # prompt tokens; 0 counts all tokens
    num_cached: int = 0  # prompt tokens found in the prefix cache when first admitted
    num_found: int = -1  # blocks in the pool when it began to wait for a load; -1: never
    arrived_at: float = 0.0  # seconds, perf_counter
    admitted_at: float = 0.0  # seconds, first admission
    first_token_at: float = 0.0
    ttft: float | None = None  # target from arrival to first token, in seconds
    tpot: float | None = None  # target per token after the first, in seconds
    # The leader of several completions computes their prompt, and followers wait for its KV.
    leader: "Request | None" = None
    followers: "list[Request]" = []
    num_scored: int = 0  # prompt tokens whose row gave its result: a logprob or a hidden state
    pooled: Any = None  # sum of the hidden states of `num_scored` tokens, float64
    adapter: AdapterRef | None = None
    slot: int = -1  # slot of its adapter; -1: no adapter, or no slot so far
    text: TextState | None = None  # state if the text changes the logits, see `begin_text`
    processors: LogitsProcessors | None = None  # the caller's logits processors
    beams: Any = None  # the `BeamRequests` that it belongs to, with beam search
    is_plain: bool = False  # no parameter but those of sampling changes logits or asks for logprobs

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or len(self.token_ids)
        is_changed = self.sampling.changes_logits or self.processors or self.text
        self.is_plain = not (is_changed or self.wants_logprobs)

    @property
    def rank(self) -> tuple[int, int]:
        """Return the order of running requests: by priority, then by arrival."""
        return self.sampling.priority, self.id

    @property
    def is_following(self) -> bool:
        """Return whether the request waits for its leader to compute their prompt."""
        return self.leader is not None and self in self.leader.followers

    @property
    def is_scoring(self) -> bool:
        """Return whether results of prompt rows are missing: the rows must be computed, because
        cached KV has none. Only the first of several completions reports logprobs.
        """
        if self.sampling.pooling is not None:
            return self.sampling.pooling.kind == "mean" and self.num_scored < self.num_prompt
        is_asked = self.sampling.prompt_logprobs is not None and self.leader is None
        return is_asked and self.num_scored < self.num_prompt - 1

    @property
    def num_computed(self) -> int:
        """Return the number of tokens with KV in the pool."""
        return self.table.num_computed

    @property
    def num_uncomputed(self) -> int:
        """Return the number of known tokens without KV in the pool."""
        return len(self.token_ids) - self.table.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output(self) -> "array[int]":
        return self.token_ids[self.num_prompt :]

    @property
    def num_left(self) -> int:
        """Return the number of tokens that may still be emitted."""
        return self.sampling.max_tokens + self.num_prompt - len(self.token_ids)

    @property
    def grammar(self) -> GrammarState | None:
        return None if self.text is None else self.text.grammar

    @property
    def wants_logprobs(self) -> bool:
        return self.sampling.logprobs is not None or self.sampling.prompt_logprobs is not None

    @property
    def due_at(self) -> float:
        """Return the time at which the first token is due."""
        return float("inf") if self.ttft is None else self.arrived_at + self.ttft

    @property
    def is_due(self) -> bool:
        """Return whether exactly one known token is uncomputed: a root, which may have a tree."""
        return len(self.token_ids) - self.table.num_computed == 1

    @property
    def is_computing(self) -> bool:
        """Return whether more than one known token is uncomputed."""
        return len(self.token_ids) - self.table.num_computed > 1

    @property
    def draft_gap(self) -> int:
        """Return the number of known tokens that the draft model has not computed."""
        return len(self.token_ids) - self.draft_table.num_computed

    def begin_text(self, vocab_size: int, grammar: GrammarState | None = None) -> None:
        """Start to follow the text. It may have output already, for example after a restart."""
        prompt, output = self.token_ids[: self.num_prompt], self.output
        self.text = TextState(self.sampling, prompt, vocab_size, grammar)
        if output:
            self.text.extend(output)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append output tokens. Followers, which have no output, first copy the state of the
        text.
        """
        self.token_ids.extend(tokens)
        if self.text is None:
            return
        for follower in self.followers:
            if follower.text is None:
                follower.text = self.text.fork()
        self.text.extend(tokens)

    def begin_output(self, stats: Stats) -> None:
        """Count the prompt, whose first token is known. Followers look nothing up."""
        self.first_token_at = perf_counter()
        if self.leader is None:
            stats.num_looked_up += self.num_prompt
            stats.num_cached += self.num_cached

    def finish_reason(self, tokens: Sequence[int]) -> str | None:
        """Return why the output ends with the last of these new tokens; None if it continues."""
        if tokens[-1] in self.sampling.stop_ids:
            return "stop"
        return "length" if len(tokens) >= self.num_left else None

    def no_token(self, failure: int) -> tuple[str, str]:
        """Return why a row has no token, and the parameter that causes it."""
        has_processors = self.processors is not None
        if failure == NOT_FINITE or not (self.text or has_processors):
            log.error(LOGITS_NOT_FINITE)
            return LOGITS_NOT_FINITE, WEIGHTS
        if self.grammar is not None:
            return f"{NOTHING_LEFT}{self.grammar.why}", "structured_outputs"
        return ALL_RULED_OUT, "logits_processors" if has_processors else "allowed_token_ids"

    def num_blocks_to_share(self, other: "Request") -> int:
        """Return the number of leading blocks with equal tokens in both requests, for the other to
        wait for. It is 0 if this request has published them all or has a larger priority value.
        """
        table = self.table
        if self.sampling.priority > other.sampling.priority or not table.is_publishing:
            return 0
        if other.is_scoring:
            return 0

        def differs(place: int) -> bool:
            key = table.key(self.token_ids, place)
            return key is None or key != other.table.key(other.token_ids, place)

        begin, end = table.num_published, table.num_keys(self.token_ids)
        shared = bisect_left(range(end), True, lo=min(begin, end), key=differs)
        return shared if shared > begin else 0

    def find_prefix(self) -> None:
        """Use the cached KV of its known tokens, unless it shares its leader's KV already."""
        if self.table.blocks or self.is_scoring:
            return
        match = match_checkpoint if self.table.state.size else BlockTable.match
        match(self.table, self.token_ids, self.table.pool.num_available)

    def find_draft_prefix(self, max_blocks: int) -> None:
        """Use draft KV of the leader or the cache, at most `max_blocks` blocks without an owner.
        Parts of blocks are left out.
        """
        table, leader = self.draft_table, self.leader
        if size := table.state.size:  # a draft state has one owner, as `fork_followers` says
            if table.num_computed == 0 and max_blocks > size:
                table.clear()
                match_checkpoint(table, self.token_ids, max_blocks - size)
            return
        table.trim()
        shared = min(self.num_prompt, len(self.token_ids) - 1)
        is_there = leader is not None and leader.draft_table.num_computed >= shared
        if leader is not None and is_there and not table.blocks:
            table.fork(leader.draft_table, shared)
        else:
            table.match_blocks(self.token_ids, max_blocks)

    def fork_followers(self) -> "list[Request]":
        """Share the computed prompt with the followers, and return them. The last prompt token is
        left out, because each follower computes it for its first output. Followers with a
        recurrent state look the prompt up instead, because a fork has no state of its own.
        """
        forked, self.followers = self.followers, []
        for request in forked:
            if not self.table.state.size:
                request.table.fork(self.table, self.num_prompt - 1)
        return forked

    def detach(self) -> "Request | None":
        """Leave leader and followers. The first follower becomes the leader of the others and is
        returned.
        """
        if self.leader is not None and self.is_following:
            self.leader.followers.remove(self)
        if not self.followers:
            return None
        first, *others = self.followers
        first.leader, first.followers, self.followers = None, others, []
        for other in others:
            other.leader = first
        return first

    def publish(self) -> None:
        """Give keys to the blocks full of committed tokens, so that other requests find them."""
        self.table.publish(self.token_ids)
        if self.draft_table.blocks:
            self.draft_table.publish(self.token_ids)

    def publish_end(self) -> None:
        """Let requests find the KV after the last full block, too. Call it before `release`."""
        self.table.publish_end(self.token_ids)
        self.draft_table.publish_end(self.token_ids)

    def release(self) -> None:
        """Free all blocks; the KV must be computed again."""
        self.table.clear()
        self.draft_table.clear()


class ScheduledRequest(msgspec.Struct, eq=False):
    """A request's rows in a step: its tokens [start, end), then the nodes of its draft."""

    request: Request
    start: int
    end: int
    draft_limit: int = 0
    draft: Draft = Draft()
    first_kept: int = 0  # place of the first draft token's inputs of recurrent ops
    scores: list[TokenLogprobs] = []  # logprobs of prompt tokens in this step
    pooled: bytes = b""  # the prompt's vector, float32, once a request in pooling is complete

    @property
    def is_sampled(self) -> bool:
        """Return whether the last known token is among the rows: at least one new token follows,
        except in pooling.
        """
        return self.is_complete and self.request.sampling.pooling is None

    @property
    def is_pooled(self) -> bool:
        return self.request.sampling.pooling is not None

    @property
    def is_complete(self) -> bool:
        return self.end == len(self.request.token_ids)

    @property
    def is_root(self) -> bool:
        end, request = self.end, self.request  # as `is_sampled`, in one call
        is_complete = end - self.start == 1 and end == len(request.token_ids)
        return is_complete and request.sampling.pooling is None

    def count_rows(self) -> None:
        """Count the rows of known tokens as computed, after their step."""
        table = self.request.table
        table.num_computed = self.end
        if table.state.size:
            publish_snapshot(table, self.request.token_ids)

    def draft_item(self, limit: int) -> DraftRequest:
        """Return the request in the form that sources and drafters get."""
        r = self.request
        return DraftRequest(r.id, r.token_ids, limit, r.sampling.temperature, r.sampling.seed)
