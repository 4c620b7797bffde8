"""Linear maps of codes on a GPU beside the same map in bf16."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from specserve_bench.gpu.timing import device_seconds
from specserve_bench.maps import BF16, KINDS, Kind
from specserve_kernels import Codes, Ops


def map_times(ops: Ops, shape: tuple[int, int], rows: Sequence[int]) -> dict[str, list[float]]:
    """Microseconds of a map [N, K] by its form and the rows that are multiplied."""
    times = {}
    for kind in KINDS:
        packed = ops.prepack(weight(kind, *shape))
        for n in rows:
            x = ops.place(torch.randn(n, shape[1]).bfloat16())
            taken = device_seconds(partial(ops.linear, x, packed))
            times[f"{kind.name}, {n} rows"] = [round(1e6 * t, 1) for t in taken]
    return times


def weight(kind: Kind, N: int, K: int) -> Tensor | Codes:
    if kind is BF16:
        return torch.randn(N, K).bfloat16()
    group = min(kind.group, K)
    q = torch.randint(0, 1 << kind.bits, (N, K), dtype=torch.uint8)
    return Codes(kind.bits, group, q, torch.rand(N, K // group))
