"""Verify trees of draft tokens against the target's tokens, and count the results.

`SpecDecodeStats` counts over all requests.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import msgspec

from specserve.engine.runner import AskedLogprobs, Runner, TargetTokens, scored
from specserve.exchange.messages import (
    CostState,
    PlanState,
    RowCost,
    SourceCounts,
    SourceStats,
    Stats,
    StepOutput,
    TokenLogprobs,
    VerifiedTree,
)
from specserve.scheduling import Request, ScheduledRequest
from specserve.speculation.costs import Step, StepCosts
from specserve.speculation.planner import Plan
from specserve_drafters import ROOT, Draft
from specserve_drafters.tenants import TenantScope
from specserve_kernels import Logprobs

log = logging.getLogger("specserve")

# Returns the target's token after each node, given as (request's number in the step, node of its
# tree). It is called only for nodes that `verify_tree` has reached.
TokensAfter = Callable[[list[tuple[int, int]]], list[int]]
IsLast = Callable[[int, list[int]], bool]


class AcceptedPath(msgspec.Struct, eq=False):
    """A request's new tokens in a step, and the nodes that proposed them, from the root down.

    failure  NO_TOKEN or NOT_FINITE if the last row that was reached gave no token; else 0
    """

    tokens: list[int]
    nodes: list[int]
    failure: int = 0
    logprobs: list[TokenLogprobs] = []  # logprobs of `tokens`, if the request asked for them

    def cut_failure(self) -> None:
        """Remove a failure code from the tokens. A failure after tokens fails the request in the
        next step. So the position of a failure depends on no draft.
        """
        if self.tokens[-1] < 0:
            self.failure = self.tokens.pop()
            del self.nodes[len(self.tokens) - 1 :]


# One request's draft token counts in a step, by source, and its tree if requested.
StepCounts = tuple[dict[str, SourceCounts], VerifiedTree | None]
NO_COUNTS: StepCounts = {}, None  # they are never changed


def verify_tree(
    drafts: Sequence[Draft], tokens_after: TokensAfter, is_last: IsLast
) -> list[AcceptedPath]:
    """Follow the target's tokens down each tree while a child has proposed the token.

    All requests go down one level per call of `tokens_after`. is_last(request, tokens) ends a
    request's output. The last token of a path, which no accepted node proposed, is the bonus token.
    A draft changes how many tokens a path has, never which.
    """
    paths = [AcceptedPath([], []) for _ in drafts]
    at = [(i, ROOT) for i in range(len(drafts))]
    while at:
        below = []
        for (i, node), token in zip(at, tokens_after(at), strict=True):
            path, draft = paths[i], drafts[i]
            path.tokens.append(token)
            child = draft.child(node, token) if draft.tokens else None
            if child is not None and not is_last(i, path.tokens):
                path.nodes.append(child)
                below.append((i, child))
        at = below
    return paths


def accepted_paths(
    sampled: Sequence[ScheduledRequest], answers: TargetTokens
) -> list[AcceptedPath]:
    """Return each sampled request's new tokens and the accepted nodes of its tree."""
    if not any([item.draft.tokens for item in sampled]):
        tokens = answers.after(range(len(sampled)))
        plain = [AcceptedPath([token], []) for token in tokens]
        if tokens and min(tokens) < 0:
            for path in plain:
                path.cut_failure()
        return plain
    drafts = [item.draft for item in sampled]
    roots = [0, *accumulate([1 + len(draft.tokens) for draft in drafts])]

    def tokens_after(at: list[tuple[int, int]]) -> list[int]:
        return answers.after([roots[i] + node for i, node in at])

    def is_last(i: int, tokens: list[int]) -> bool:
        return sampled[i].request.finish_reason(tokens) is not None

    paths = verify_tree(drafts, tokens_after, is_last)
    for path in paths:
        path.cut_failure()
    return paths


def give_logprobs(
    asked: AskedLogprobs,
    target: Runner,
    scheduled: Sequence[ScheduledRequest],
    paths: Sequence[AcceptedPath],
    answers: TargetTokens,
) -> None:
    """Attach logprobs: of new tokens to the paths, of prompt tokens to the scheduled requests."""
    report_drawn([s for s in scheduled if s.is_sampled], paths, answers, asked.k)
    if len(asked.rows):
        report_prompts(scheduled, target.score(asked))


def report_prompts(scheduled: Sequence[ScheduledRequest], logprobs: Logprobs) -> None:
    """Attach the logprobs of prompt tokens to their requests, in the order of the step's rows."""
    each = iter(token_logprobs(logprobs))
    for item in scheduled:
        some = islice(each, len(scored(item)))
        item.scores = [first(x, item.request.sampling.prompt_logprobs) for x in some]


def prompt_output(item: ScheduledRequest) -> StepOutput:
    """Return an output with the logprobs of a prompt that is only partly computed."""
    r = item.request
    return StepOutput(r.id, [], None, False, 0, 0, r.admitted_at, prompt_logprobs=item.scores)


def token_output(
    item: ScheduledRequest,
    path: AcceptedPath,
    counts: StepCounts,
    reason: str | None,
    *,
    is_root: bool,
    is_fallback: bool,
) -> StepOutput:
    """Return an output with the tokens of a path, which the request already has. `reason` is why
    they end the request, if so.
    """
    return StepOutput(
        id=item.request.id,
        tokens=path.tokens,
        finish_reason=reason,
        is_verified=is_root,
        num_drafted=len(item.draft.tokens),
        num_accepted=len(path.nodes),
        admitted_at=item.request.admitted_at,
        num_cached=item.request.num_cached,
        is_fallback=is_fallback,
        sources=counts[0],
        tree=counts[1],
        logprobs=path.logprobs,
        prompt_logprobs=item.scores,
    )


def pooled_output(item: ScheduledRequest) -> StepOutput:
    """Return the only output of a request whose prompt was pooled."""
    r = item.request
    at, cached = r.admitted_at, r.num_cached
    return StepOutput(r.id, [], "stop", False, 0, 0, at, num_cached=cached, pooled=item.pooled)


def report_drawn(
    sampled: Sequence[ScheduledRequest],
    paths: Sequence[AcceptedPath],
    answers: TargetTokens,
    k: int,
) -> None:
    """Attach logprobs to the paths of requests that asked for them."""
    rows, tokens, asking = list[int](), list[int](), list[tuple[Request, AcceptedPath]]()
    roots = accumulate([1 + len(s.draft) for s in sampled], initial=0)
    for item, path, root in zip(sampled, paths, roots, strict=False):
        if item.request.sampling.logprobs is not None:
            asking.append((item.request, path))
            rows += [root + node for node in (ROOT, *path.nodes)][: len(path.tokens)]
            tokens += path.tokens
    if not asking:
        return
    each = iter(token_logprobs(answers.logprobs(rows, tokens, k)))
    for request, path in asking:
        some = islice(each, len(path.tokens))
        path.logprobs = [first(x, request.sampling.logprobs) for x in some]


def token_logprobs(logprobs: Logprobs) -> list[TokenLogprobs]:
    columns = logprobs.token, logprobs.rank, logprobs.ids, logprobs.top
    return [TokenLogprobs(*x) for x in zip(*(c.tolist() for c in columns), strict=True)]


def first(logprobs: TokenLogprobs, k: int | None) -> TokenLogprobs:
    """Keep the k most likely tokens: another request of the step may have asked for more."""
    return TokenLogprobs(logprobs.logprob, logprobs.rank, logprobs.ids[:k], logprobs.top[:k])


# Verified and accepted draft tokens, by the sources that proposed them.
SourceGroups = dict[tuple[str, ...], tuple[int, int]]


class DraftSources(NamedTuple):
    """A draft, the sources of each draft token, and the number of tokens each source proposed."""

    draft: Draft
    sources: Sequence[tuple[str, ...]]
    proposed: dict[str, int]

    def groups(self, accepted: Sequence[int]) -> SourceGroups:
        sources = self.sources
        if not sources:
            return {}
        if sources.count(sources[0]) == len(sources):  # as usual
            return {sources[0]: (len(sources), len(accepted))}
        right = [sources[node - 1] for node in accepted]
        return {n: (sources.count(n), right.count(n)) for n in dict.fromkeys(sources)}


def count_error(stats: Stats, name: str) -> None:
    """Count the exception of a source that is being handled, and log it. Only the first log has
    a traceback.
    """
    sums = stats.sources[name]
    sums.errors += 1
    count = sums.errors
    if count & (count - 1) == 0:  # log 1, 2, 4, ...: failures in every step must not fill the log
        message = "drafter %s failed (%s), %d times so far; the text does not change"
        log.error(message, name, sys.exception(), count, exc_info=count == 1)


NOTHING = SourceCounts()  # counts of a source that proposed nothing; they are never changed


class SpecDecodeStats:
    """Sums over all steps by source, in `stats`. A token that several sources propose counts for
    each.
    """

    def __init__(self, names: Sequence[str], stats: Stats) -> None:
        """Add to the existing sums. A source that is added later gets the next bit."""
        self.names, self.stats, self.sums = names, stats, stats.sources
        for name in names:
            self.sums.setdefault(name, SourceStats())
        self.bits = {name: 1 << i for i, name in enumerate(self.sums)}
        self.nothing = dict.fromkeys(names, NOTHING)

    def failed(self, name: str) -> None:
        """Count the exception that is being handled."""
        count_error(self.stats, name)

    def notify(self, source: Any, what: str, *args: object) -> None:
        """Call a method of a source, if it has the method, and count an exception."""
        try:
            if (method := getattr(source, what, None)) is not None:
                method(*args)
        except BaseException:  # the rest of the commit must run
            self.failed(source.name)

    def took(self, name: str, seconds: float) -> None:
        self.sums[name].seconds += seconds
        self.sums[name].saved_seconds -= seconds

    def add(self, names: Sequence[str], sums: Iterator[float]) -> None:
        """Add sums of sources, see `Told` in C++; `names` is by number."""
        for number in sums:
            own, proposed, seconds = self.sums[names[int(number)]], next(sums), next(sums)
            own.proposed += int(proposed)
            own.seconds += seconds
            own.verified += int(next(sums))
            own.accepted += int(next(sums))
            own.saved_seconds += next(sums) - seconds
            by_depth = own.accepted_at
            for depth in range(int(next(sums))):
                if depth == len(by_depth):
                    by_depth.append(0)
                by_depth[depth] += int(next(sums))

    def tree_of(
        self, draft: Draft, sources: Sequence[Sequence[str]], accepted: Sequence[int]
    ) -> VerifiedTree:
        bits = [sum(self.bits[name] for name in names) for names in sources]
        return VerifiedTree(draft.tokens, draft.parents, bits, [*accepted])

    def enter(
        self,
        draft_sources: DraftSources,
        accepted: Sequence[int],
        groups: SourceGroups,
        is_tree_asked: bool,
    ) -> StepCounts:
        """Count a request's draft tokens of the step."""
        draft, sources, proposed = draft_sources
        sums, counts = self.sums, self.nothing.copy()
        for name, number in proposed.items():
            counts[name] = SourceCounts(number)
            sums[name].proposed += number
        for names, (number, right) in groups.items():
            depths: Sequence[int] = range(right)
            if len(groups) > 1:
                depths = [d for d, node in enumerate(accepted) if sources[node - 1] == names]
            for name in names:
                own, every = counts[name], sums[name]
                own.verified += number
                own.accepted += right
                every.verified += number
                every.accepted += right
                by_depth = every.accepted_at
                if depths and depths[-1] >= len(by_depth):  # the first that was accepted so deep
                    by_depth += [0] * (depths[-1] + 1 - len(by_depth))
                for depth in depths:
                    by_depth[depth] += 1
        if not is_tree_asked or not draft.tokens:
            return counts, None
        return counts, self.tree_of(draft, sources, accepted)


def cost_state(costs: StepCosts) -> CostState:
    steps = [RowCost(rows, s, costs.is_known(rows)) for rows, s in costs.table().items()]
    per_token, per_row, per_request = costs.added
    return CostState(steps, per_token, per_row, per_request, costs.slowdown)


def plan_state(plan: Plan, step: Step) -> PlanState:
    return PlanState(
        roots=step.num_roots,
        prompt_rows=step.prompt_rows,
        guesses=plan.rows - step.rows,
        rows=plan.rows,
        tokens=plan.tokens,
        seconds=plan.seconds,
        kept=step.kept,
    )


def scope_of(request: Request) -> TenantScope:
    digest = "" if request.adapter is None else request.adapter.digest
    return request.caller.tenant, request.sampling.cache_salt, digest
