"""The one sampler: it draws tokens from rows of logits, for plain steps and for trees alike."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specserve.exchange.sampling_params import Sampling
from specserve_drafters import Draft
from specserve_kernels import Ops, SampleParams

Node = tuple[int, int]  # a request's number in the step, and a node of its tree


class Sampler:
    """Draws the target's tokens after the nodes of one step's trees.

    A token depends on logits, parameters and its place in the text only. Row by row, the logits are
    those of every request's root and guesses in turn.
    """

    def __init__(
        self, requests: Sequence[Sampling], lengths: Sequence[int], drafts: Sequence[Draft]
    ) -> None:
        self.requests, self.lengths = requests, lengths
        self.depths = [draft.depths() for draft in drafts]
        self.root_rows = [0, *accumulate(map(len, self.depths))]
        self.is_greedy = all(s.temperature == 0 for s in requests)

    def nodes(self) -> Iterator[Node]:
        """All of them, in the order of the logits' rows."""
        return ((i, node) for i, depths in enumerate(self.depths) for node in range(len(depths)))

    def row(self, node: Node) -> int:
        return self.root_rows[node[0]] + node[1]

    def draw(self, ops: Ops, logits: Tensor, at: list[Node]) -> list[int]:
        """The tokens after some nodes."""
        rows = torch.from_numpy(np.array([self.row(node) for node in at], dtype=np.int64))
        tokens: list[int] = ops.sample(logits, rows, self.params(at)).tolist()
        return tokens

    def look_up(self, tokens: list[int], at: list[Node]) -> list[int]:
        """As `draw`, from the tokens after all nodes."""
        return [tokens[self.row(node)] for node in at]

    def params(self, at: Sequence[Node]) -> SampleParams:
        """How the tokens after some nodes are chosen; host tensors."""
        if self.is_greedy:
            return SampleParams.greedy(len(at))
        asked = [self.requests[i] for i, _ in at]
        index = [self.lengths[i] + self.depths[i][node] for i, node in at]
        columns = (
            np.array([s.temperature for s in asked], dtype=np.float32),
            np.array([s.top_k for s in asked], dtype=np.int32),
            np.array([s.top_p for s in asked], dtype=np.float32),
            np.array([s.min_p for s in asked], dtype=np.float32),
            np.array([s.seed for s in asked], dtype=np.int64),
            np.array(index, dtype=np.int64),
        )
        return SampleParams(*map(torch.from_numpy, columns))
