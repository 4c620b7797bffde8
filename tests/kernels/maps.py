"""Linear maps with all that may follow them, and how far their results may be off."""

import itertools
import random
from typing import NamedTuple

import torch

from specserve_kernels import Codes, cpu, reference
from specserve_kernels.cpu import arguments
from tests.kernels.random_steps import random_tensor

OUTPUT_ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


class Maps(NamedTuple):
    """A plain and a gated map, a bias for each, and a residual to add to."""

    weight: torch.Tensor | Codes
    gate_up: torch.Tensor | Codes
    bias: torch.Tensor
    both: torch.Tensor
    residual: torch.Tensor
    packed: arguments.Packed
    gated: arguments.Packed

    def outputs(self, gemm, x, rows):
        """What each op makes of some rows; which of them they are only matters to the residual."""
        return {
            "linear": gemm.linear(x, self.packed),
            "lm_head": gemm.lm_head(x, self.packed),
            "linear with a bias": gemm.linear(x, self.packed, self.bias),
            "linear_add": gemm.linear_add(x, self.packed, self.bias, self.residual[rows]),
            "linear_gated": gemm.linear_gated(x, self.gated, self.both),
        }

    def check(self, outputs, x):
        """Each output is within the bound of its roundings."""
        dtype, none = x.dtype, torch.zeros(len(self.bias))
        plain, plain_off = exact(x, self.weight, none)
        mapped, mapped_off = exact(x, self.weight, self.bias)
        residual = self.residual.double()
        residual_off = num_additions(self.weight) * 2.0**-24 * residual.abs()
        both = exact(x, self.gate_up, self.both)
        (gate, up), (gate_off, up_off) = (y.chunk(2, dim=1) for y in both)
        silu = gate * gate.sigmoid()
        # The slope of silu is at most 1.1; its own arithmetic and the product round 8 times.
        product_off = 1.1 * gate_off * (up.abs() + up_off) + silu.abs() * up_off
        want = {
            "linear": (plain, plain_off),
            "lm_head": (plain, plain_off),
            "linear with a bias": (mapped, mapped_off),
            "linear_add": (mapped + residual, mapped_off + residual_off),
            "linear_gated": (silu * up, product_off + 8 * 2.0**-24 * (silu * up).abs()),
        }
        for name, got in outputs.items():
            right, off = want[name]
            stored = torch.float32 if name == "lm_head" else dtype
            bound = off + OUTPUT_ROUNDING[stored] * (right.abs() + off)
            assert got.dtype == stored and ((got.double() - right).abs() <= bound).all(), name

    def check_rows(self, gemm, x, sizes):
        """A row's bits are the same beside any others, and on any number of threads."""
        R = len(x)
        want = self.outputs(gemm, x, list(range(R)))
        steps = [(1 + size % 3, list(range(size))) for size in sizes]
        steps += [(2, rows) for rows in chunks(random.Random(R), R)]
        for threads, rows in [*steps, *((t, list(range(130))) for t in (1, 2, 3))]:
            torch.set_num_threads(threads)
            for name, got in self.outputs(gemm, x[rows], rows).items():
                assert torch.equal(got, want[name][rows]), (name, threads, rows)


def check_bits(packed, codes, x, sizes, names):
    """Some rows of these outputs of the C++ ops have the bits of the reference."""
    for n in sizes:
        want = codes.outputs(reference, x[:n], list(range(n)))
        got = packed.outputs(cpu, x[:n], list(range(n)))
        for name in names:
            assert torch.equal(got[name], want[name]), (name, n)


def chunks(rng, num_rows):
    """Rows of some steps that compute all rows, in a random order."""
    order = rng.sample(range(num_rows), num_rows)
    cuts = sorted(rng.sample(range(1, num_rows), 9))
    return [order[a:b] for a, b in itertools.pairwise([0, *cuts, num_rows])]


def maps_of(gemm, weight, gate_up, dtype, num_rows):
    """Maps of two weights, the second with twice as many rows."""
    N = (weight.q if isinstance(weight, Codes) else weight).shape[0]
    bias, both = (random_tensor(n, dtype=dtype, seed=n) for n in (N, 2 * N))
    packed = gemm.prepack(weight), gemm.prepack(gate_up, is_gated=True)
    residual = random_tensor(num_rows, N, dtype=dtype, seed=4)
    return Maps(weight, gate_up, bias, both, residual, *packed)


def random_maps(gemm, N, K, dtype, num_rows):
    weight, gate_up = (random_tensor(n, K, dtype=dtype, seed=n) for n in (N, 2 * N))
    return maps_of(gemm, weight, gate_up, dtype, num_rows)


VALUES = (-128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)


def random_codes(N, K, bits, group, has_zero=False, seed=0, has_offset=False, has_table=False):
    draw = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 1 << bits, (N, K), generator=draw, dtype=torch.uint8)
    shape = N, K // group
    scale = (torch.rand(shape, generator=draw) - 0.2) / (1 << bits)
    largest = 17 if bits == 4 else 256  # readers of GPTQ add 1 to what a file has
    zero = torch.randint(0, largest, shape, generator=draw).to(torch.uint8)
    codes = Codes(bits, group, q, scale, zero if has_zero or has_offset else None)
    if has_table:
        return codes._replace(table=VALUES)
    if not has_offset:
        return codes
    share = 0.3 * torch.rand(shape, generator=draw)  # of the codes, which zero is off the middle
    return codes._replace(offset=(zero - codes.middle + share * codes.middle) * scale)


def exact(x, weight, bias):
    """x W^T + bias in float64, and how far a float32 sum may be off.

    Products of bfloat16 are exact in float32, those of float32 are fused with the addition: each
    addition rounds a sum, which is at most the sum of all magnitudes, by 2^-24 of it. Levels that
    flush denormals lose at most 2^-126 each time.
    """
    x, bias = x.double(), bias.double()
    magnitude = x.abs() @ magnitudes(weight).T + bias.abs()
    off = num_additions(weight) * (2.0**-24 * 1.01 * magnitude + 2.0**-126)
    return x @ widened(weight).T + bias, off


def num_additions(weight):
    """Of a sum: of the products, a bias and a residual. Codes are added up group by group, and a
    group's sum, times its scale, is fused with one more addition. With offsets it has one more
    part: the row's values, summed up 16 at a time, times a number that was rounded three times.
    """
    if not isinstance(weight, Codes):
        return weight.shape[1] + 2
    of_groups = weight.group + weight.scale.shape[1] + 2
    return of_groups if weight.offset is None else of_groups + weight.group // 16 + 10


def widened(weight):
    """(q - zero) * scale + offset, without rounding; other weights as they are."""
    if not isinstance(weight, Codes):
        return weight.double()
    weight = weight.without_table()
    N, K = weight.q.shape
    zero = weight.middle if weight.zero is None else weight.zero[..., None].double()
    values = (weight.q.double().view(N, -1, weight.group) - zero) * weight.scale[..., None].double()
    if weight.offset is not None:
        values += weight.offset[..., None].double()
    return values.view(N, K)


def magnitudes(weight):
    """Of the values; with offsets, of what codes and offsets add to a sum: they may cancel."""
    values = widened(weight)
    if not isinstance(weight, Codes) or weight.offset is None:
        return values.abs()
    codes = widened(weight._replace(zero=None, offset=None))
    return codes.abs() + (values - codes).abs()
