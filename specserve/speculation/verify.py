"""Verification: following the target's tokens down trees of draft tokens."""

from collections.abc import Callable, Sequence
from itertools import accumulate, islice

import msgspec

from specserve.engine.runner import AskedLogprobs, Runner, TargetTokens, scored
from specserve.exchange.messages import TokenLogprobs
from specserve.scheduling import Request, ScheduledRequest
from specserve_drafters import ROOT, Draft
from specserve_kernels import Logprobs

# The target's token after each node, given as (request's number in the step, node of its tree);
# called only for nodes that the verify_tree has reached.
TokensAfter = Callable[[list[tuple[int, int]]], list[int]]
IsLast = Callable[[int, list[int]], bool]


class AcceptedPath(msgspec.Struct, eq=False):
    """A request's new tokens in a step, and the nodes that proposed them, from the root down.

    failure  NO_TOKEN or NOT_FINITE if the last row that was reached gave no token; else 0
    """

    tokens: list[int]
    nodes: list[int]
    failure: int = 0
    logprobs: list[TokenLogprobs] = []  # of these tokens, where the request asked for them

    def cut_failure(self) -> None:
        """Take out what is no token. The request fails if that comes first, so in the next step
        after tokens: where it fails depends on no draft.
        """
        if self.tokens[-1] < 0:
            self.failure = self.tokens.pop()
            del self.nodes[len(self.tokens) - 1 :]


def verify_tree(
    drafts: Sequence[Draft], tokens_after: TokensAfter, is_last: IsLast
) -> list[AcceptedPath]:
    """Follow the target's tokens down each tree for as long as a child has guessed them.

    All requests go down a level at once. is_last(request, tokens) ends a request's output. The
    last token of a path, which no node has guessed, is the bonus token. A draft decides how many
    tokens a path has, never which.
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
    """The new tokens of each sampled request, and the accepted nodes of its tree."""
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
    """Give paths the logprobs of their tokens, and requests those of their prompts' tokens."""
    tell_drawn([s for s in scheduled if s.is_sampled], paths, answers, asked.k)
    if len(asked.rows):
        tell_prompts(scheduled, target.score(asked))


def tell_prompts(scheduled: Sequence[ScheduledRequest], said: Logprobs) -> None:
    """Give the items what is said of their prompts' tokens, in the order of the step's rows."""
    each = iter(token_logprobs(said))
    for item in scheduled:
        some = islice(each, len(scored(item)))
        item.scores = [first(x, item.request.sampling.prompt_logprobs) for x in some]


def tell_drawn(
    sampled: Sequence[ScheduledRequest],
    paths: Sequence[AcceptedPath],
    answers: TargetTokens,
    k: int,
) -> None:
    """Give the paths of requests that asked for them their tokens' logprobs."""
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


def token_logprobs(said: Logprobs) -> list[TokenLogprobs]:
    columns = said.token, said.rank, said.ids, said.top
    return [TokenLogprobs(*x) for x in zip(*(c.tolist() for c in columns), strict=True)]


def first(said: TokenLogprobs, k: int | None) -> TokenLogprobs:
    """With the k likeliest alone: another request of the step may have asked for more."""
    return TokenLogprobs(said.logprob, said.rank, said.ids[:k], said.top[:k])
