"""Linear maps whose input rows are quantized to int8 codes: exact integers, scaled in one order."""

import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.reference.kv import quantize


def rounded_products(x: Tensor, codes: Codes) -> Tensor:
    """Return x W^T with each group of a row quantized to int8 codes and one scale, as heads of
    8-bit KV are.

    The sum S of (row code) * (weight code - zero), or * table entry, is an exact integer. Groups
    add up in order: total = fma(S, row scale * weight scale, total). An offset comes before that:
    total = fma(row scale * sum of row codes, offset, total). All CPU levels with FMA instructions
    have the same bits.
    """
    codes = codes.without_zeros()
    N, K = codes.q.shape
    num_groups = codes.scale.shape[1]
    rows, scales = quantize(x.float().view(len(x), num_groups, K // num_groups), torch.int8)
    integers = _integers(codes).view(N, num_groups, -1)
    total = torch.zeros(len(x), N, device=x.device)
    for g in range(num_groups):
        row, scale = rows[:, g].double(), scales[:, g, None]
        if codes.offset is not None:
            total = fma(scale * row.sum(1, keepdim=True).float(), codes.offset[:, g], total)
        sums = row @ integers[:, g].double().T  # exact in float64, in any order
        total = fma(sums.float(), scale * codes.scale[:, g], total)
    return total


def _integers(codes: Codes) -> Tensor:
    """Return code - zero, or the table's entry, of each weight: [N, K] int32."""
    q = codes.q.int()
    if codes.table is not None:
        return torch.tensor(codes.table, dtype=torch.int32, device=q.device)[q]
    if codes.zero is None:
        return q - codes.middle
    return q - codes.zero.int().repeat_interleave(codes.group, dim=1)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32 tensors, rounded once.

    The float64 sum is rounded to odd, so that rounding it to float32 is right (Boldo, Melquiond
    2008): its last bit becomes 1 if the sum was not exact.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    bits = total.view(torch.int64)
    is_changed = total.isfinite() & (error != 0) & (bits & 1 == 0)
    # Larger magnitudes have larger bits.
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(is_changed, bits + toward, bits).view(torch.float64).float()
