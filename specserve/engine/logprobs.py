"""What the target says of tokens: which logprobs a step has to tell, and who asked for them."""

from collections.abc import Sequence
from itertools import accumulate, islice

import numpy as np

from specserve.engine.runner import Answers
from specserve.engine.step_input import AskedLogprobs
from specserve.exchange.messages import TokenLogprobs
from specserve.scheduling import Request, ScheduledRequest
from specserve.speculation.verify import Path
from specserve_drafters import ROOT
from specserve_kernels import Logprobs


def asked_logprobs(
    scheduled: Sequence[ScheduledRequest], sampled: Sequence[ScheduledRequest], vocab_size: int
) -> AskedLogprobs | None:
    """What a step has to tell; None for nothing."""
    rows, tokens, most = list[int](), list[int](), list[int]()
    sizes = [item.end - item.start + len(item.draft) for item in scheduled]
    for item, first in zip(scheduled, accumulate(sizes, initial=0), strict=False):
        places = scored(item)
        rows += [first + place - item.start for place in places]
        tokens += item.request.token_ids[places.start + 1 : places.stop + 1]
        most += [item.request.sampling.prompt_logprobs or 0] if places else []
    drawn = [s.request.sampling.logprobs for s in sampled]
    most += [k for k in drawn if k is not None]
    if not most:
        return None
    k, is_drawn = min(max(most), vocab_size), any(k is not None for k in drawn)
    return AskedLogprobs(k, is_drawn, np.array(rows, np.int64), np.array(tokens, np.int64))


def scored(item: ScheduledRequest) -> range:
    """The places of the step's rows behind which a token of the prompt stands that was not told."""
    request = item.request
    if not request.is_scoring:
        return range(0)
    return range(max(item.start, request.num_scored), min(item.end, request.num_prompt - 1))


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
