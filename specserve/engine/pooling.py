"""Pools the rows of prompts into embeddings and scores."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.engine.runner import Runner
from specserve.models.decoder import TargetModel
from specserve.scheduling import ScheduledRequest


def pool(scheduled: Sequence[ScheduledRequest], target: Runner) -> None:
    """Take the rows of the last launch into account, and set `pooled` of requests that are
    complete.
    """
    firsts = accumulate([s.end - s.start + len(s.draft) for s in scheduled], initial=0)
    pooled = [
        (item, first)
        for item, first in zip(scheduled, firsts, strict=False)
        if item.request.sampling.pooling is not None
    ]
    add_to_sums([each for each in pooled if kind_of(each[0]) == "mean"], target)
    ended = [each for each in pooled if each[0].is_complete and kind_of(each[0]) != "mean"]
    lasts = [(item, first + item.end - item.start - 1) for item, first in ended]
    with_logits = [each for each in lasts if kind_of(each[0]) == "logits"]
    with_hidden = [each for each in lasts if kind_of(each[0]) != "logits"]
    logits = chain.from_iterable(target.logits([row for _, row in with_logits]))
    for (item, _), of_row in zip(with_logits, logits, strict=True):
        assert item.request.sampling.pooling is not None, "the request is pooled"
        item.pooled = packed(of_row[[*item.request.sampling.pooling.token_ids]].cpu().numpy())
    hidden = hidden_states([row for _, row in with_hidden], target)
    for (item, _), of_row in zip(with_hidden, hidden, strict=True):
        item.pooled = packed(scores(of_row, target) if kind_of(item) == "score" else of_row)


def kind_of(item: ScheduledRequest) -> str:
    pooling = item.request.sampling.pooling
    return "" if pooling is None else pooling.kind


def add_to_sums(pooled: Sequence[tuple[ScheduledRequest, int]], target: Runner) -> None:
    """Add hidden states to the sums of requests with mean pooling.

    A preempted request computes some rows again, which are in the sum already. Rows are added one
    by one in float64, so that the mean does not depend on the parts of the prompt.
    """
    new = [range(max(item.start, item.request.num_scored), item.end) for item, _ in pooled]
    rows = [
        first + position - item.start
        for (item, first), positions in zip(pooled, new, strict=True)
        for position in positions
    ]
    hidden = hidden_states(rows, target).astype(np.float64)
    for (item, _), positions in zip(pooled, new, strict=True):
        request, (own, hidden) = item.request, np.split(hidden, [len(positions)])
        parts = own if request.pooled is None else np.vstack([request.pooled, own])
        if len(parts):
            request.pooled = np.add.reduce(parts, axis=0)
            request.num_scored += len(positions)
        if item.is_complete:
            item.pooled = packed(request.pooled / request.num_prompt)


def hidden_states(rows: Sequence[int], target: Runner) -> NDArray[np.float32]:
    """Return the hidden states [n, hidden] of rows of the last launch, after the final norm."""
    model = cast(TargetModel, target.decoder)
    assert target.outputs is not None, "no step has been run"
    residual = target.outputs.residual
    if not rows:
        return np.empty((0, residual.shape[1]), np.float32)
    at = torch.tensor(rows, dtype=torch.int64, device=residual.device)
    found: NDArray[np.float32] = model.hidden(residual, at).cpu().numpy()
    return found


def scores(hidden: NDArray[np.float32], target: Runner) -> NDArray[np.float32]:
    """Return the outputs [labels] of the classifier's head for one row, which are independent of
    other rows.
    """
    score = cast(TargetModel, target.decoder).score
    assert score is not None, "the server checks for a classifier"
    found: NDArray[np.float32] = score.cpu().numpy() @ hidden
    return found


def packed(vector: NDArray[np.floating]) -> bytes:
    return vector.astype("<f4").tobytes()


def is_finite(vector: bytes) -> bool:
    return bool(np.isfinite(np.frombuffer(vector, "<f4")).all())
