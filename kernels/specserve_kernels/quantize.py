"""Rounding weights to codes of 4 or 8 bits."""

import torch
from torch import Tensor

from specserve_kernels.codes import Codes

GROUP = 64  # columns that share a scale of 4-bit codes; 8-bit codes have one for a whole row
# What the code of a group's extreme would be if codes were not limited: all are tried.
ENDS = {4: (7.33, 7.67, 8.0, 8.33, 8.67, 9.0, 9.5, 10.25), 8: (128.0,)}
LEAST = 2.0**-100  # a scale whose inverse is far from overflow
LANES = 16  # sums over a group are added up in so many parts
PIECE = 1 << 20  # values that are rounded at a time


def quantize(weight: Tensor, bits: int) -> Codes:
    """The weight rounded to codes, with the scales that make the error of a group small.

    A scale is negative where a group's extreme is positive, as the lowest code has no positive
    counterpart. It is a bfloat16 number: so much is kept of it in a file. Where a group has NaN or
    infinities, it is NaN.

    weight  [N, K]  bfloat16 | float32; for 4 bits K is a multiple of 64
    bits    4: groups of 64, a scale with the least sum of squares among several; 8: a scale a row
    """
    N, K = weight.shape
    group = GROUP if bits == 4 else K
    rows = max(1, PIECE // K)
    pieces = [_round(piece.float().view(-1, group), bits) for piece in torch.split(weight, rows)]
    q, scale = map(torch.cat, zip(*pieces, strict=True))
    return Codes(bits, group, q.view(N, K), scale.view(N, K // group))


def _round(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups [n, group], as in quantize.cpp: with equal bits."""
    low, high = x.aminmax(dim=1)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    extreme = torch.where(-low >= high, low, high)
    scales = [_scale(extreme, end) for end in ENDS[bits]]
    scale, least = scales[0], None
    for tried in scales if len(scales) > 1 else ():
        off = _code(x, tried, bits) * tried[:, None] - x
        error = _sum(off * off)
        scale = tried if least is None else torch.where(error < least, tried, scale)
        least = error if least is None else torch.minimum(error, least)
    q = (_code(x, scale, bits) + (1 << bits - 1)).nan_to_num(0.0).to(torch.uint8)
    return q, torch.where(x.isfinite().all(1), scale, torch.nan)


def _scale(extreme: Tensor, end: float) -> Tensor:
    scale = (extreme / -end).bfloat16().float()
    return torch.where(scale.abs() < LEAST, 1.0, scale)


def _code(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    middle = 1 << bits - 1
    return (x * (1.0 / scale)[:, None]).round().clamp(-middle, middle - 1)


def _sum(x: Tensor) -> Tensor:
    """Over rows, in the order of vec.h."""
    first, *others = x.view(len(x), -1, LANES).unbind(1)
    for part in others:
        first = first + part
    while first.shape[1] > 1:
        front, back = first.chunk(2, dim=1)
        first = front + back
    return first[:, 0]
