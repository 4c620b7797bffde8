"""Mixtures of experts. Each row is multiplied only by the weights of its experts.

A row and one of its experts are a pair. Pairs are sorted by expert and cut into tiles of one expert
each. Only the device knows the number of tiles, and a graph's launches are fixed. The launch
therefore covers the maximum number of tiles, and surplus programs exit.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.cuda.coded import LinearMap, PlainMap
from specserve_kernels.cuda.paged import IS_COMPILED
from specserve_kernels.cuda.ranks import all_gather, of_holders
from specserve_kernels.ranks import Gathering
from specserve_kernels.types import PackedExperts, Routing

TILE, OUTPUTS, COLUMNS = 16, 64, 64  # pairs and outputs per program, columns per iteration
FEW_OUTPUTS, MANY_COLUMNS = 16, 256  # of maps to an adapter's rank: few programs, long sums


def route(
    logits: Tensor,
    k: int,
    normalizes: bool,
    is_sigmoid: bool = False,
    correction: Tensor | None = None,
    factor: float | Tensor = 1.0,
) -> Routing:
    """Same as the reference op."""
    wide = logits.float()
    scores = wide.sigmoid() if is_sigmoid else wide.softmax(dim=1)
    ranked = wide if correction is None else scores + correction
    experts = ranked.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    if normalizes:
        weights = weights / weights.sum(dim=1, keepdim=True)
    own = factor[experts] if isinstance(factor, Tensor) else factor
    return Routing(weights * own, experts.int())


def packed(maps: Iterable[LinearMap], bias: Tensor | None) -> PackedExperts:
    """Pack the experts' maps. Codes stay separate; plain weights become one tensor [E, N, K]."""
    each = [*maps]
    plain = [x.weight for x in each if isinstance(x, PlainMap)]
    if len(plain) < len(each):
        return PackedExperts(each, bias)
    weight = torch.stack(plain)
    return PackedExperts([PlainMap(x) for x in weight], bias, weight)


class Tiles(NamedTuple):
    """The pairs, sorted by expert, and the tiles. Surplus tiles at the end have no pairs.

    pairs   [R k]  int64  pair k r + j is row r's expert j
    expert  [n]    int64  expert of each tile
    first   [n]    int64  place in `pairs` of a tile's first pair
    behind  [n]    int64  end of the expert's pairs in `pairs`
    """

    pairs: Tensor
    expert: Tensor
    first: Tensor
    behind: Tensor


def tiles(pairs: Tensor, num: Tensor) -> Tiles:
    """Cut pairs, sorted by expert, into tiles. `num` [E] int64 counts the pairs of each expert."""
    ends, num_tiles = num.cumsum(0), (num + TILE - 1) // TILE
    tile_ends = num_tiles.cumsum(0)
    most = min(len(num), len(pairs)) + len(pairs) // TILE
    tile = torch.arange(most, device=pairs.device)
    expert = torch.searchsorted(tile_ends, tile, right=True).clamp(max=len(num) - 1)
    # Surplus tiles belong to the last expert and begin after its pairs.
    first = (ends - num)[expert] + (tile - (tile_ends - num_tiles)[expert]) * TILE
    return Tiles(pairs, expert, first, ends[expert])


@triton.jit
def _multiply(
    x,  # [rows, K]
    weight,  # [E, N, K]
    bias,  # [E, N]
    pairs,
    expert,
    first,
    behind,
    out,  # [pairs, N]
    N,
    K,
    HAS_BIAS: tl.constexpr,
    EACH: tl.constexpr,  # pairs per row of x
    TILE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
):
    tile = tl.program_id(0)
    begin, end = tl.load(first + tile), tl.load(behind + tile)
    if begin < end:
        place = begin + tl.arange(0, TILE)
        is_pair = (place < end)[:, None]
        pair = tl.load(pairs + place, mask=place < end, other=0)[:, None]
        n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        output = tl.load(expert + tile) * N + n
        rows, columns = x + pair // EACH * K, weight + output * K
        total = tl.zeros([TILE, OUTPUTS], tl.float32)
        for start in range(0, K, COLUMNS):
            k = start + tl.arange(0, COLUMNS)
            some = tl.load(rows + k[None, :], mask=is_pair & (k < K)[None, :], other=0.0)
            part = tl.load(columns + k[:, None], mask=(n < N) & (k < K)[:, None], other=0.0)
            total += tl.dot(some.to(DOT), part.to(DOT), input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + output, mask=n < N, other=0.0).to(tl.float32)
        at = out + pair * N + n
        tl.store(at, total.to(out.dtype.element_ty), mask=is_pair & (n < N))


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    dtype: torch.dtype,
    each: int = 1,
) -> Tensor:
    """Multiply each pair's row of x by its expert's weight: [pairs, N], `each` pairs per row of x.

    Outputs of rows without pairs are not written.
    """
    assert x.is_contiguous() and weight.is_contiguous(), "rows with gaps"
    _, N, K = weight.shape
    out = torch.empty(len(x) * each, N, dtype=dtype, device=x.device)
    is_narrow = N <= FEW_OUTPUTS
    outputs, columns = (FEW_OUTPUTS, MANY_COLUMNS) if is_narrow else (OUTPUTS, COLUMNS)
    _multiply[(len(tiles.expert), triton.cdiv(N, outputs))](
        *(x, weight, weight if bias is None else bias, *tiles, out, N, K),
        HAS_BIAS=bias is not None,
        EACH=each,
        TILE=TILE,
        OUTPUTS=outputs,
        COLUMNS=columns,
        DOT=tl.bfloat16 if x.dtype == torch.bfloat16 and IS_COMPILED else tl.float32,
        num_warps=4,
        num_stages=3,
    )
    return out


def add_experts(
    x: Tensor,
    routing: Routing,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor | None,
    gated: Callable[[Tensor], Tensor],
    gathering: Gathering | None = None,
    holders: Gathering | None = None,
) -> Tensor:
    """Same as the reference op, but the first map's outputs are also rounded before `gated`."""
    if not len(x):
        return (
            x.new_empty(0, down.each[0].linear(x, None).shape[1]) if residual is None else residual
        )
    if gate_up.joined is None or down.joined is None:
        if holders is not None:
            assert residual is not None, "ranks that hold whole experts add to a residual"
            return add_held(x, routing, gate_up, down, residual, gated, holders)
        return add_each(x, routing, gate_up, down, residual, gated, gathering)
    flat, k = routing.experts.flatten().long(), routing.experts.shape[1]
    own, E = flat, len(gate_up.joined)
    if holders is not None:  # pairs of other ranks come last, and are in no tile
        first, end = holders.own
        own = torch.where((flat >= first) & (flat < end), flat - first, E)
    num = torch.zeros(E + 1, dtype=torch.int64, device=flat.device)
    num.scatter_add_(0, own, torch.ones_like(own))
    work = tiles(own.argsort(stable=True), num[:E])
    inner = multiply(x, gate_up.joined, gate_up.bias, work, x.dtype, k)
    if holders is not None:  # pairs in no tile are not written
        inner.masked_fill_((own == E)[:, None], 0.0)
    inner = gated(inner)
    if gathering is not None:
        inner = all_gather(inner, gathering)
    sums = multiply(inner, down.joined, down.bias, work, torch.float32)
    if holders is not None:
        sums = of_holders(sums.masked_fill_((own == E)[:, None], 0.0), flat, holders)
    shares = routing.weights[:, :, None] * sums.view(*routing.weights.shape, -1)
    return added(shares.sum(dim=1), residual, x.dtype)


def add_each(
    x: Tensor,
    routing: Routing,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor | None,
    gated: Callable[[Tensor], Tensor],
    gathering: Gathering | None = None,
) -> Tensor:
    """Add the outputs of experts with coded weights. This is slow: every expert multiplies all
    rows.
    """
    total = torch.zeros(1, 1, device=x.device)
    for e, (first, second) in enumerate(zip(gate_up.each, down.each, strict=True)):
        biases = [None if maps.bias is None else maps.bias[e] for maps in (gate_up, down)]
        is_chosen = routing.experts == e
        weight = routing.weights.where(is_chosen, 0.0).sum(dim=1, keepdim=True)
        inner = gated(first.linear(x, biases[0]))
        if gathering is not None:
            inner = all_gather(inner, gathering)
        found = second.linear(inner, biases[1]).float()
        total = total + torch.where(is_chosen.any(dim=1, keepdim=True), weight * found, 0.0)
    return added(total, residual, x.dtype)


def added(total: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    return total.to(dtype) if residual is None else residual.copy_(residual.float() + total)


def add_held(
    x: Tensor,
    routing: Routing,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor,
    gated: Callable[[Tensor], Tensor],
    holders: Gathering,
) -> Tensor:
    """Do the same as `add_each` with the experts of this rank, and add those of other ranks."""
    shape = *routing.experts.shape, residual.shape[1]
    sums = torch.zeros(shape, device=x.device)
    for e, (first, second) in enumerate(zip(gate_up.each, down.each, strict=True)):
        biases = [None if maps.bias is None else maps.bias[e] for maps in (gate_up, down)]
        found = second.linear(gated(first.linear(x, biases[0])), biases[1]).float()
        is_chosen = routing.experts == holders.own[0] + e
        sums = torch.where(is_chosen[:, :, None], found[:, None, :], sums)
    flat = routing.experts.flatten()
    sums = of_holders(sums.flatten(0, 1), flat, holders).view(shape)
    return residual.copy_(residual.float() + (routing.weights[:, :, None] * sums).sum(dim=1))
