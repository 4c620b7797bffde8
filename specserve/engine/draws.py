"""How the tokens of a step are drawn: sampling parameters by row, as plain arrays."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.exchange.sampling_params import Sampling
from specserve_drafters import Draft
from specserve_kernels import SampleParams


class Draws(NamedTuple):
    """What the token after each of n rows is drawn with; the columns are those of SampleParams."""

    is_greedy: bool  # every temperature is 0: the other columns change nothing
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    token_index: NDArray[np.int64]

    def params(self, rows: NDArray[np.int64] | None = None) -> SampleParams:
        """Of all rows, or of some, as host tensors."""
        if self.is_greedy:
            return SampleParams.greedy(len(self.seeds if rows is None else rows))
        columns = self[1:] if rows is None else [column[rows] for column in self[1:]]
        return SampleParams(*map(torch.from_numpy, columns))


@cache
def greedy_draws(n: int) -> Draws:
    """The likeliest token after each of n rows. Made once for each n: nobody writes into it."""
    zeros, ones = np.zeros(n, np.float32), np.ones(n, np.float32)
    integers = np.zeros(n, np.int64)
    return Draws(True, zeros, integers.astype(np.int32), ones, zeros, integers, integers)


def draws_of(
    samplings: Sequence[Sampling], lengths: Sequence[int], drafts: Sequence[Draft]
) -> Draws:
    """For the rows of each request's root and guesses in turn.

    `lengths` are the requests' known tokens: a node's token has the place length + depth in the
    text, however the tree numbers it, and draws with the noise of that place.
    """
    counts = [1 + len(draft) for draft in drafts]
    if all(s.temperature == 0 for s in samplings):
        return greedy_draws(sum(counts))
    places = [n + depth for n, d in zip(lengths, drafts, strict=True) for depth in d.depths()]

    def column(values: list[Any], dtype: Any) -> NDArray[Any]:
        return np.repeat(np.array(values, dtype), counts)

    return Draws(
        False,
        column([s.temperature for s in samplings], np.float32),
        column([s.top_k for s in samplings], np.int32),
        column([s.top_p for s in samplings], np.float32),
        column([s.min_p for s in samplings], np.float32),
        column([s.seed for s in samplings], np.int64),
        np.array(places, np.int64),
    )
