"""RoPE (rotary embedding): frequencies of dimension pairs, and tables of cosines and sines."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from specserve.models.rope import QueryGrowth, RopeParameters
from specserve_kernels.types import Rotary


def frequencies(rope: RopeParameters, head_dim: int) -> Tensor:
    """Radians per position for each rotating pair of dimensions, [<= D/2] float32. The other pairs
    follow.

    Computed in float32 in transformers' order of operations, to get the same bits.
    """
    if rope.kind == "proportional":  # the exponents are of the whole head
        turning = 1.0 / wavelengths(rope.theta, head_dim)[: rope.turning_pairs(head_dim)]
        return turning / rope.factor
    head_dim = rope.rotating(head_dim)
    inverse = 1.0 / wavelengths(rope.theta, head_dim)
    match rope.kind:
        case "linear":  # every position is divided by the factor
            return inverse / rope.factor
        case "llama3":
            return llama3(rope, inverse)
        case "factors":
            return inverse / torch.tensor(rope.factors)
        case "longrope":
            return 1.0 / (torch.tensor(rope.factors) * wavelengths(rope.theta, head_dim))
        case "yarn":
            return yarn(rope, head_dim)
    return inverse


def wavelengths(theta: float, head_dim: int) -> Tensor:
    """theta^(2i/D): positions per radian."""
    powers: Tensor = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return powers


def llama3(rope: RopeParameters, inverse: Tensor) -> Tensor:
    """Keep short waves, stretch long waves by the factor, and interpolate between them."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_length
    wave = 2 * math.pi / inverse
    stretched = torch.where(wave > original / low, inverse / rope.factor, inverse)
    if low == high:  # Llama 4: no wave is between them
        return stretched
    smooth = (original / wave - low) / (high - low)
    between = (1 - smooth) * stretched / rope.factor + smooth * stretched
    is_between = ~(wave < original / high) & ~(wave > original / low)
    return torch.where(is_between, between, stretched)


def yarn(rope: RopeParameters, head_dim: int) -> Tensor:
    """Keep dimensions that rotate often within the original length, and stretch slow ones."""
    waves = wavelengths(rope.theta, head_dim)
    low, high = yarn_range(rope, head_dim)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - torch.clamp(ramp, 0, 1)
    return 1.0 / (rope.factor * waves) * (1 - kept) + 1.0 / waves * kept


def yarn_range(rope: RopeParameters, head_dim: int) -> tuple[float, float]:
    """The dimensions that rotate `beta_fast` and `beta_slow` times in the original length."""

    def dimension(turns: float) -> float:
        ratio = rope.original_length / (turns * 2 * math.pi)
        return (head_dim * math.log(ratio)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high  # avoids a division by zero


def tables(rope: RopeParameters, head_dim: int, length: int) -> Rotary:
    """Cosines and sines for positions [0, length); pairs that do not rotate are last."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies(rope, head_dim)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    still = 0, head_dim // 2 - angles.shape[1]  # columns on the right
    return Rotary(pad(cos, still, value=1.0), pad(sin, still), query_scale(rope, length))


def query_scale(rope: RopeParameters, length: int) -> Tensor | None:
    """Llama 4's factor of queries, which makes attention over long texts sharper."""
    if rope.query_beta == 0:
        return None
    positions = torch.arange(length, dtype=torch.float32)
    return grown(rope.query_beta, positions / rope.original_length)


def grown(scale: float, texts: Tensor) -> Tensor:
    """The factor of queries at positions that are measured in texts of the training length."""
    return 1 + scale * torch.log(1 + torch.floor(texts))


def order(rope: RopeParameters, head_dim: int, has_neighbors: bool) -> Tensor:
    """A head's dimensions [D] int64 in the kernels' order: dimensions i and i + D/2 are a pair.

    A checkpoint has two halves of the rotating dimensions, or pairs of neighbors, then the rest.
    """
    half, size = head_dim // 2, rope.rotating(head_dim)
    turning, rest = torch.arange(size), torch.arange(size, head_dim)
    first, second = (turning[::2], turning[1::2]) if has_neighbors else turning.chunk(2)
    left = half - size // 2
    return torch.cat([first, rest[:left], second, rest[left:]])


def still(rotary: Rotary, growth: QueryGrowth | None = None) -> Rotary:
    """A table of the same size without rotation, for a layer without RoPE."""
    cos, sin = torch.ones_like(rotary.cos), torch.zeros_like(rotary.sin)
    if growth is None:
        return Rotary(cos, sin)
    counts = torch.arange(1, len(cos) + 1, dtype=torch.float32, device=cos.device)
    return Rotary(cos, sin, grown(growth.scale, counts / growth.length))
