"""Beam search: the beams of a prompt are requests of one token each, whose tables are forks.

A step gives each beam its most likely next tokens. The best continuations of all beams become the
next beams. Their tables fork those of their parents, so beams share the KV of their common prefix,
and a beam copies a partly full block before it writes to it. Scores, ends and early stopping are
those of transformers' `generate(num_beams=...)`.
"""

from array import array
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from specserve.exchange.messages import Stats, StepOutput, TokenLogprobs
from specserve.exchange.sampling_params import BeamSearch
from specserve.memory.blocks import BlockTable
from specserve.memory.states import RequestState
from specserve.scheduling import Request, Scheduler
from specserve.scheduling.text_state import TextState
from specserve.speculation.verify import AcceptedPath


class Likely(NamedTuple):
    """A likely next token, and what is reported of it."""

    token: int
    logprobs: TokenLogprobs

    @property
    def logprob(self) -> float:
        return self.logprobs.logprob


class Beam(NamedTuple):
    """Output tokens, and the sum of their logprobs."""

    tokens: tuple[Likely, ...] = ()
    total: float = 0.0

    def then(self, likely: Likely) -> "Beam":
        return Beam((*self.tokens, likely), self.total + likely.logprob)


class Ended(NamedTuple):
    """An ended beam, with the score that ranks it."""

    score: float
    beam: Beam


class Continuation(NamedTuple):
    """A candidate: a beam's number, its next token, and the sum of all logprobs."""

    parent: int
    likely: Likely
    total: float


class BeamSelection:
    """The beams of one prompt, and those that have ended."""

    def __init__(
        self, width: int, search: BeamSearch, end_ids: Collection[int], max_tokens: int
    ) -> None:
        self.width, self.search, self.end_ids = width, search, end_ids
        self.max_tokens = max_tokens
        self.beams = [Beam()]
        self.ended: list[Ended] = []  # at most `width`, best first
        self.is_over = False

    @property
    def num_candidates(self) -> int:
        """Return how many continuations leave enough beams if all that end a text are among
        them. A single beam is the greedy text, which ends with its first end.
        """
        return 1 if self.width == 1 else self.width * max(2, 1 + len(self.end_ids))

    def advance(self, found: Sequence[Sequence[Likely]]) -> list[int]:
        """Continue the beams; return the number of each new beam's parent. `found` has likely next
        tokens of each beam.
        """
        length = len(self.beams[0].tokens) + 1
        every = (
            Continuation(i, likely, beam.total + likely.logprob)
            for i, beam in enumerate(self.beams)
            for likely in found[i]
        )
        best = nlargest(self.num_candidates, every, key=lambda c: c.total)
        is_last = length >= self.max_tokens
        ends = [is_last or c.likely.token in self.end_ids for c in best]
        live = [c for c, does_end in zip(best, ends, strict=True) if not does_end][: self.width]
        first = zip(best[: self.width], ends, strict=False)
        self.end([c for c, does_end in first if does_end], length)
        self.beams = [self.beams[c.parent].then(c.likely) for c in live]
        self.is_over = not live or self.is_settled(live[0].total, length)
        return [c.parent for c in live]

    def end(self, continuations: Sequence[Continuation], length: int) -> None:
        """Keep the best ended beams."""
        for c in continuations:
            beam = self.beams[c.parent].then(c.likely)
            self.ended.append(Ended(self.score(c.total, length), beam))
        self.ended.sort(key=lambda ended: ended.score, reverse=True)
        del self.ended[self.width :]

    def is_settled(self, best: float, length: int) -> bool:
        """Return whether the ended beams are final; `best` is the highest sum of a live beam."""
        if len(self.ended) < self.width:
            return False
        if self.search.early_stopping is True:
            return True
        if self.search.early_stopping == "never" and self.search.length_penalty > 0:
            length = self.max_tokens
        return self.score(best, length) <= self.ended[-1].score

    def score(self, total: float, length: int) -> float:
        """Return what ranks a beam: its sum of logprobs with the length penalty."""
        divisor: float = float(length) ** self.search.length_penalty
        return total / divisor


class BeamRequests:
    """The requests of one prompt with beam search: a beam each. The first computes the prompt.

    A request whose row was computed has no row in later steps until the other beams have theirs.
    """

    def __init__(self, requests: list[Request], vocab_size: int) -> None:
        first = requests[0]
        search, ends = first.sampling.beam_search, first.sampling.stop_ids
        assert search is not None, "the request asks for beam search"
        asked = len(requests), search, ends, first.sampling.max_tokens
        self.requests, self.selection = requests, BeamSelection(*asked)
        self.num_logprobs = first.sampling.logprobs or 0  # that are reported
        first.followers = []
        # A grammar may forbid the most likely tokens.
        is_free = not first.sampling.grammar
        k = min(self.selection.num_candidates, vocab_size) if is_free else vocab_size
        for request in requests:
            request.leader, request.beams = None, self
            request.sampling = replace(request.sampling, logprobs=k)
        self.found: dict[int, list[Likely]] = {}  # by beam
        self.num_steps = 0

    @property
    def is_lost(self) -> bool:
        """Return whether the search is over without a text."""
        return self.selection.is_over and not self.selection.ended

    def take(
        self, request: Request, path: AcceptedPath, scheduler: Scheduler, stats: Stats
    ) -> list[StepOutput]:
        """Note a beam's likely next tokens. After those of all beams, make the next beams. Return
        the outputs of all requests once the search is over.
        """
        beam, selection = self.requests.index(request), self.selection
        if not selection.beams[0].tokens:
            request.publish()
            request.begin_output(stats)
            for each in self.requests:
                each.first_token_at = request.first_token_at
        self.found[beam] = [*islice(self.likely(request, path), selection.num_candidates)]
        if len(self.found) < len(selection.beams):
            return []
        num_before = len(selection.beams)
        parents = selection.advance([self.found[i] for i in range(num_before)])
        self.found.clear()
        self.num_steps += 1
        if selection.is_over:
            return [*self.outputs()]
        self.branch(parents, scheduler)
        return []

    def likely(self, request: Request, path: AcceptedPath) -> Iterator[Likely]:
        """Yield the tokens that the request's grammar allows, most likely first."""
        if not path.logprobs:
            return
        its, grammar = path.logprobs[0], request.grammar
        few = its.ids[: self.num_logprobs], its.top[: self.num_logprobs]
        allowed = None if grammar is None else bits_of(grammar.mask([]))
        for rank, (token, logprob) in enumerate(zip(its.ids, its.top, strict=True), 1):
            if allowed is None or allowed[token]:
                yield Likely(token, TokenLogprobs(logprob, rank, *few))

    def branch(self, parents: Sequence[int], scheduler: Scheduler) -> None:
        """Give each beam its parent's text and a fork of its table."""
        num_live, new = len(parents), [beam.tokens[-1].token for beam in self.selection.beams]
        sources = [self.requests[parent] for parent in parents]
        # The last fork of a table takes its recurrent state. The others copy it.
        last = {parent: place for place, parent in enumerate(parents)}
        states = [
            (
                one.token_ids + array("i", [token]),
                forked(one.table, last[parents[place]] == place),
                followed(one.text, token),
            )
            for place, (one, token) in enumerate(zip(sources, new, strict=True))
        ]
        for request in self.requests:
            request.table.clear()
            request.slot = self.requests[0].slot  # only the first waited for the adapter
        for request, state in zip(self.requests, states, strict=False):
            request.token_ids, request.table, request.text = state
        for request in self.requests[num_live:]:
            scheduler.remove(request)
        for request in self.requests[:num_live]:
            if not request.table.blocks and request in scheduler.running:
                request.find_prefix()
            if request not in scheduler.running and request not in scheduler.waiting:
                scheduler.add(request)

    def outputs(self) -> Iterator[StepOutput]:
        """Yield the ended beams, best first. A beam that no text was found for is empty."""
        ended = [one.beam for one in self.selection.ended]
        for request, beam in zip(self.requests, ended, strict=False):
            tokens = [likely.token for likely in beam.tokens]
            reason = "stop" if tokens[-1] in self.selection.end_ids else "length"
            yield self.output(request, tokens, reason, [its.logprobs for its in beam.tokens])
        for request in self.requests[len(ended) :]:
            yield self.output(request, [], "length", [])

    def output(
        self, request: Request, tokens: list[int], reason: str, logprobs: list[TokenLogprobs]
    ) -> StepOutput:
        """Return the output of a beam. Its times are those of the search, which the first began."""
        first = self.requests[0]
        return StepOutput(
            id=request.id,
            tokens=tokens,
            finish_reason=reason,
            is_verified=False,
            num_drafted=0,
            num_accepted=0,
            admitted_at=first.admitted_at,
            num_cached=first.num_cached,
            logprobs=logprobs,
            first_token_at=first.first_token_at,
            num_steps=self.num_steps,
        )


def forked(table: BlockTable, takes_state: bool) -> BlockTable:
    """Return a new table that shares all blocks of this one, see `BlockTable.fork`."""
    hasher = copy(table.hasher)
    if hasher is not None:
        hasher.keys = [*hasher.keys]
    size, interval = table.state.size, table.state.interval
    state = RequestState(size, interval) if size else None
    fork = BlockTable(table.pool, table.block_size, table.owner, hasher, state)
    fork.fork(table, table.num_computed, takes_state)
    return fork


def followed(text: TextState | None, token: int) -> TextState | None:
    """Return the state of a text after one more token."""
    if text is None or text.grammar is None:
        return text
    grammar, text = text.grammar.fork(), copy(text)
    grammar.extend([token])
    text.grammar = grammar
    return text


def bits_of(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return a mask with one value per id."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")
