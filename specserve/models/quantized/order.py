"""Columns that share a scale and are no neighbors, as GPTQ's desc_act makes them."""

import torch
from torch import Tensor

from specserve_kernels import Codes


def ordered(codes: Codes, groups: Tensor | None) -> Codes | Tensor:
    """The codes if column i is in group i / group; else their values, with column i in `groups[i]`.

    Codes cannot say the latter, and rows would have to be permuted before each map.
    """
    if groups is None or torch.equal(groups.long(), torch.arange(len(groups)) // codes.group):
        return codes
    columns = groups.long()
    if columns.min() < 0 or columns.max() >= codes.scale.shape[1]:
        raise ValueError(f"g_idx has groups that are not there: there are {codes.scale.shape[1]}")
    zero = None if codes.zero is None else codes.zero[:, columns]
    return codes._replace(group=1, scale=codes.scale[:, columns], zero=zero).widen(torch.float32)
