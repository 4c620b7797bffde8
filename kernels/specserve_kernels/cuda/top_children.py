"""The most probable draws of the target model: the best of each split, then the best of all.

At T = 0 and tau = 1 these are the most probable tokens, so `logprobs` uses the same kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.cuda.sample import LOWEST, gumbel, rank, ranked_id, ranked_value
from specserve_kernels.types import Logprobs, SampleParams

_LEAST_FINITE = tl.constexpr(-3.4028234663852886e38)
_SPLIT = 1024  # ids per program


@triton.jit
def _best_of_split(
    logits,
    temperature,
    seeds,
    index,
    ranks,
    mosts,
    totals,
    V,
    tau,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a split's K best candidates, its maximum weight, and its sum of exp(weight -
    maximum).
    """
    i, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id = split * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + i * V + id, mask=id < V, other=float("-inf")).to(tl.float32)
    t = tl.load(temperature + i)
    if t > 0:
        noise = gumbel(tl.load(seeds + i), tl.load(index + i), split * BLOCK, BLOCK)
        z = tl.div_rn(z, t) + noise
    w = tl.div_rn(z, tau)
    candidate = rank(w, id)  # ids >= V rank last: -inf and the highest ids
    first = tl.max(candidate, 0)
    most = ranked_value(first)
    most = tl.where(most == float("-inf"), _LEAST_FINITE, most)  # finite, so that exp(-inf) is 0
    at = i * tl.num_programs(1) + split
    tl.store(mosts + at, most)
    tl.store(totals + at, tl.sum(tl.exp(w - most), 0))
    for j in range(K):
        tl.store(ranks + at * K + j, first)
        first = tl.max(tl.where(candidate < first, candidate, LOWEST), 0)


@triton.jit
def _best_of_all(
    ranks, mosts, totals, out, splits, K: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the K best of all splits' candidates: ids, then the bits of their log-weights."""
    i = tl.program_id(0).to(tl.int64)
    split, at = tl.arange(0, SPLITS), tl.arange(0, BLOCK)
    each = tl.load(mosts + i * splits + split, mask=split < splits, other=_LEAST_FINITE)
    total = tl.load(totals + i * splits + split, mask=split < splits, other=0.0)
    most = tl.max(each, 0)
    log_total = tl.log(tl.sum(total * tl.exp(each - most), 0))
    candidate = tl.load(ranks + i * splits * K + at, mask=at < splits * K, other=LOWEST)
    first = tl.max(candidate, 0)
    out += i * 2 * K
    for j in range(K):
        weight = ranked_value(first) - most - log_total
        # If the weights are NaN, the ids are 0, 1, 2, ...
        tl.store(out + j, tl.where(log_total == log_total, ranked_id(first), j).to(tl.int32))
        tl.store(out + K + j, weight.to(tl.int32, bitcast=True))
        first = tl.max(tl.where(candidate < first, candidate, LOWEST), 0)


def launch_top_children(logits: Tensor, params: SampleParams, k: int, tau: float) -> Tensor:
    """Launch `top_children`; return its packed result on the device without waiting.

    ->  [R, 2k]  int32  a row's k ids, then the bits of their k log-weights
    """
    R, V = logits.shape
    assert k <= V, "k exceeds the vocabulary"
    asked = params.temperature, params.seeds, params.token_index
    for x in (logits, *asked):
        assert x.is_contiguous(), "a tensor is not contiguous"
    block = min(_SPLIT, max(4, triton.next_power_of_2(V)))
    splits = triton.cdiv(V, block)
    ranks = logits.new_empty(R * splits * k, dtype=torch.int64)
    # Two tensors, not slices of one: Triton recompiles kernels for a different alignment.
    mosts, totals = (logits.new_empty(R * splits, dtype=torch.float32) for _ in range(2))
    out = logits.new_empty(R, 2 * k, dtype=torch.int32)
    each = ranks, mosts, totals
    _best_of_split[(R, splits)](logits, *asked, *each, V, float(tau), K=k, BLOCK=block)
    sizes = triton.next_power_of_2(splits), triton.next_power_of_2(splits * k)
    _best_of_all[(R,)](*each, out, splits, K=k, SPLITS=sizes[0], BLOCK=sizes[1], num_warps=8)
    return out


def top_children(logits: Tensor, params: SampleParams, k: int, tau: float) -> tuple[Tensor, Tensor]:
    """Same as the reference op. Logits and params are on the device, results on the host."""
    return unpacked(launch_top_children(logits, params, k, tau))


def unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Copy ids and log-weights to the host in one copy."""
    packed = packed.cpu()
    k = packed.shape[1] // 2
    return packed[:, :k].long(), packed[:, k:].contiguous().view(torch.float32)


_BLOCK = 8192  # ids of a row that a program loads at once


@triton.jit
def _rank(logits, tokens, likeliest, out, V, width, BLOCK: tl.constexpr):
    """Compute a token's rank among a row's ids, and the bits of its log-probability.

    likeliest  [n, width]  the first is the id of the greatest logit
    out        [n, 2]
    """
    i, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x, token = logits + i * V, tl.load(tokens + i)
    own = tl.load(x + token).to(tl.float32)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        id = start + lane
        value = tl.load(x + id, mask=id < V, other=float("-inf")).to(tl.float32)
        before += ((value > own) | ((value == own) & (id < token))).to(tl.int32)
    likeliest += i * width
    most = tl.load(x + tl.load(likeliest)).to(tl.float32)
    log_total = -tl.load(likeliest + width // 2).to(tl.float32, bitcast=True)
    tl.store(out + 2 * i, 1 + tl.sum(before, 0))
    tl.store(out + 2 * i + 1, (own - most - log_total).to(tl.int32, bitcast=True))


def logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Same as the reference op. Arguments are on the device; results reach the host in one copy."""
    n, V = len(rows), logits.shape[1]
    # Few values of K, because each value compiles kernels.
    K = min(1 if k <= 1 else triton.next_power_of_2(max(32, k)), V)
    some, zeros = logits.index_select(0, rows), torch.zeros_like(tokens)
    params = SampleParams.of([zeros.float(), *[zeros] * 5])
    likeliest = launch_top_children(some, params, K, 1.0)
    own = likeliest.new_empty(n, 2)
    block = min(_BLOCK, triton.next_power_of_2(V))
    _rank[(n,)](some, tokens, likeliest, own, V, 2 * K, BLOCK=block, num_warps=32)
    rank, token, ids, top = torch.cat([own, likeliest], 1).cpu().split([1, 1, K, K], 1)
    values = (x.contiguous().view(torch.float32) for x in (token[:, 0], top[:, :k]))
    return Logprobs(next(values), rank[:, 0].long(), ids[:, :k].long(), next(values))
