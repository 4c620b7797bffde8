"""The one sampler: it draws tokens from rows of logits, for plain steps and for trees alike."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specserve.sampling.params import Sampling
from specserve_kernels import Ops, SampleParams


class Sampler:
    """Draws for the requests of one step; a token depends on logits, parameters and index only."""

    def __init__(self, ops: Ops, logits: Tensor, requests: Sequence[Sampling]) -> None:
        self.ops, self.logits, self.requests = ops, logits, requests
        self.is_greedy = all(s.temperature == 0 for s in requests)

    def draw(self, who: list[int], rows: list[int], index: list[int]) -> list[int]:
        """The tokens after some rows.

        who    the request (its number in this step) that each row belongs to
        rows   rows of the logits
        index  the place of each token in its request's token_ids
        """
        params = SampleParams.greedy(len(who)) if self.is_greedy else self.params(who, index)
        at = torch.from_numpy(np.array(rows, dtype=np.int64))
        tokens: list[int] = self.ops.sample(self.logits, at, params).tolist()
        return tokens

    def params(self, who: list[int], index: list[int]) -> SampleParams:
        asked = [self.requests[i] for i in who]
        columns = (
            np.array([s.temperature for s in asked], dtype=np.float32),
            np.array([s.top_k for s in asked], dtype=np.int32),
            np.array([s.top_p for s in asked], dtype=np.float32),
            np.array([s.min_p for s in asked], dtype=np.float32),
            np.array([s.seed for s in asked], dtype=np.int64),
            np.array(index, dtype=np.int64),
        )
        return SampleParams(*map(torch.from_numpy, columns))
