"""The reference's Gumbel noise inside a kernel: a function of seed, index and id only."""

import triton
import triton.language as tl


@triton.jit
def gumbel(seed, index, first, BLOCK: tl.constexpr):
    """-log(-log1p(-u)) of the ids [first, first + BLOCK); `first` and BLOCK are multiples of 4."""
    quad = first // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = tl.philox(seed, quad, index.to(tl.int32), 0, 0)  # 10 rounds by default
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # w0 w1 w2 w3 of each quad
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    w = 1.0 - u
    # log1p(-u) = log(w) * u / (1 - w) undoes the rounding of w (Kahan); where w = 1 it is -u.
    is_one = w == 1.0
    e = tl.where(is_one, u, -tl.log(w) * (u / tl.where(is_one, 1.0, 1.0 - w)))
    return -tl.log(e)
