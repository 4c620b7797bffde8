"""Gives requests the logprobs that a step has computed."""

from collections.abc import Sequence
from itertools import accumulate, islice

from specserve.engine.runner import Answers, Runner
from specserve.engine.step_input import AskedLogprobs, scored
from specserve.exchange.messages import TokenLogprobs
from specserve.scheduling import Request, ScheduledRequest
from specserve.speculation.verify import Path
from specserve_drafters import ROOT
from specserve_kernels import Logprobs


def give_logprobs(
    asked: AskedLogprobs,
    target: Runner,
    scheduled: Sequence[ScheduledRequest],
    paths: Sequence[Path],
    answers: Answers,
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
    sampled: Sequence[ScheduledRequest], paths: Sequence[Path], answers: Answers, k: int
) -> None:
    """Give the paths of requests that asked for them their tokens' logprobs."""
    rows, tokens, asking = list[int](), list[int](), list[tuple[Request, Path]]()
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
