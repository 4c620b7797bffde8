"""Embeddings of the token ids for each layer, as in Gemma 3n and Gemma 4.

One table has the embeddings of all layers next to each other. A map of the token embedding is added
to them. At the end of each layer, the layer's columns gate a narrow map of the residual stream.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve.models.weight import Weight
from specserve_kernels import Ops

MIX = 2.0**-0.5  # factor of the sum of both parts


class PerLayerTable(NamedTuple):
    """A model's weights for L layers with P columns each.

    embedding   [V, L P]              in the model's dtype, or quantized
    projection  packed [L P, hidden]
    norm        [P]                   of each layer's columns of the projection, float32, times MIX
    factor      of embeddings
    eps         of the norm
    """

    embedding: Weight
    projection: Any
    norm: Tensor
    factor: float
    eps: float

    def inputs(self, ops: Ops, token_ids: Tensor, embedded: Tensor, dtype: torch.dtype) -> Tensor:
        """The inputs of all layers, [R, L P].

        token_ids  [R]          int64
        embedded   [R, hidden]  their token embeddings
        """
        own = ops.scale(ops.embed(self.embedding, token_ids, dtype), self.factor)
        return ops.rms_norm_add(ops.linear(embedded, self.projection), self.norm, self.eps, own)


class PerLayerMaps(NamedTuple):
    """A layer's weights. Maps are packed.

    begin  first of the layer's columns of the inputs
    gate   [P, hidden]
    out    [hidden, P]
    norm   [hidden]     of the result, float32
    """

    begin: int
    gate: Any
    out: Any
    norm: Tensor
