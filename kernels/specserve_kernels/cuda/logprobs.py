"""Log-probabilities of tokens and of the likeliest: these are the children at T = 0 and tau = 1."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.cuda.top_children import launch_top_children
from specserve_kernels.types import Logprobs, SampleParams

_BLOCK = 8192  # ids of a row that a program loads at a time


@triton.jit
def _rank(logits, tokens, likeliest, out, V, width, BLOCK: tl.constexpr):
    """A token's place among a row's ids, and the bits of its log-probability.

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
    """As the reference's, on the host, in one copy; what is given is on the device."""
    n, V = len(rows), logits.shape[1]
    K = min(1 if k <= 1 else triton.next_power_of_2(max(32, k)), V)  # each compiles kernels
    some, zeros = logits.index_select(0, rows), torch.zeros_like(tokens)
    params = SampleParams.of([zeros.float(), *[zeros] * 5])
    likeliest = launch_top_children(some, params, K, 1.0)
    own = likeliest.new_empty(n, 2)
    block = min(_BLOCK, triton.next_power_of_2(V))
    _rank[(n,)](some, tokens, likeliest, own, V, 2 * K, BLOCK=block, num_warps=32)
    rank, token, ids, top = torch.cat([own, likeliest], 1).cpu().split([1, 1, K, K], 1)
    values = (x.contiguous().view(torch.float32) for x in (token[:, 0], top[:, :k]))
    return Logprobs(next(values), rank[:, 0].long(), ids[:, :k].long(), next(values))
