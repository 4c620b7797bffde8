"""Several residual streams next to each other in a row, and sparse gates, row by row.

A row of N streams has N K columns; stream j has the columns [j K, (j + 1) K).
"""

import torch
from torch import Tensor

from specserve_kernels.reference.layers import GATES

LEAST_SQUARE = 1e-5  # minimum mean square of a stream that is divided by its root


def spread_streams(x: Tensor, first: Tensor) -> Tensor:
    """Return the first stream and the others, scaled to its root mean square.

    x      [R, (N - 1) K]  bfloat16 | float32
    first  [R, K]          as x
    ->     [R, N K]        as x
    """
    K = first.shape[1]
    parts = [_matched(part, first) for part in torch.split(x, K, dim=1)]
    return torch.cat([first, *(part.to(x.dtype) for part in parts)], dim=1)


def add_matched(x: Tensor, first: Tensor, total: Tensor) -> Tensor:
    """Add x, scaled to the root mean square of `first`, to `total`, in place; return it.

    x, first, total  [R, K]  bfloat16 | float32; the sum is rounded once
    """
    return total.copy_(total.float() + _matched(x, first))


def _matched(x: Tensor, first: Tensor) -> Tensor:
    wanted, found = (_mean_squares(y) for y in (first, x))
    return x.float() * (wanted.sqrt() / found.clamp(min=LEAST_SQUARE).sqrt())


def _mean_squares(x: Tensor) -> Tensor:
    squares = [row.square().mean() for row in x.float()]
    return torch.stack(squares)[:, None] if squares else x.new_zeros(0, 1, dtype=torch.float32)


def mix_streams(streams: Tensor, coefficients: Tensor) -> Tensor:
    """Return new streams: stream j plus the sum over i of coefficient j N + i times stream i.

    streams       [R, N K]  bfloat16 | float32
    coefficients  [R, N N]  as streams
    ->            [R, N K]  as streams; rounded once
    """
    R = len(streams)
    N = round(coefficients.shape[1] ** 0.5)
    wide, factors = streams.float().view(R, N, -1), coefficients.float().view(R, N, N, 1)
    total = torch.zeros_like(wide)
    for i in range(N):
        total += factors[:, :, i] * wide[:, i : i + 1]
    return (wide + total).to(streams.dtype).view(streams.shape)


def correct_streams(streams: Tensor, x: Tensor, coefficients: Tensor) -> Tensor:
    """Add (1 + coefficient j) times the difference of x and stream 0 to each stream j, in place;
    return the streams.

    streams       [R, N K]  bfloat16 | float32; rounded once
    x             [R, K]    as streams
    coefficients  [R, N]    as streams
    """
    R, N = coefficients.shape
    wide = streams.float().view(R, N, -1)
    difference = x.float()[:, None] - wide[:, :1]
    return streams.copy_((wide + difference * (1 + coefficients.float()[:, :, None])).flatten(1))


def weigh_columns(x: Tensor, begin: int, weight: Tensor) -> Tensor:
    """Return the columns [begin, begin + K), multiplied by a weight.

    x       [R, W]  bfloat16 | float32
    weight  [K]     float32
    ->      [R, K]  as x; rounded once
    """
    return (x[:, begin : begin + len(weight)].float() * weight).to(x.dtype)


def sparse_gated(x: Tensor, curve: str, deviations: float) -> Tensor:
    """Return f(max(0, gate - cutoff)) * up. The cutoff of a row is the mean of its gates plus
    `deviations` times their standard deviation.

    x      [R, 2F]  bfloat16 | float32; gate in the first half of a row, up in the second
    curve  the function f, as in `linear_gated`
    ->     [R, F]   as x; rounded once
    """
    halves = [row.clone().chunk(2) for row in x.float()]
    rows = [GATES[curve](_above_cutoff(gate, deviations)) * up for gate, up in halves]
    return torch.stack(rows).to(x.dtype) if rows else x[:, x.shape[1] // 2 :]


def _above_cutoff(gate: Tensor, deviations: float) -> Tensor:
    mean = gate.mean()
    deviation = (gate - mean).square().mean().sqrt()
    return (gate - (mean + deviations * deviation)).relu()
