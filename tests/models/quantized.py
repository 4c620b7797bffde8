"""Tiny checkpoints in the formats of quantized weights, packed number by number.

Beside each stands the same checkpoint with the values that the numbers mean.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import tiny_checkpoint

WEIGHTS = "model.safetensors"


class Case(NamedTuple):
    config: dict[str, object]  # quantization_config
    pack: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]  # weight -> its tensors, its values


def write(folder, case, is_quantized=lambda name: "_proj" in name):
    """The quantized checkpoint, and a plain one of the same values."""
    quantized = tiny_checkpoint(folder / "quantized", seed=3)
    plain = tiny_checkpoint(folder / "plain", seed=3)
    stored, meant = {}, {}
    for name, tensor in load_file(plain / WEIGHTS).items():
        if name.endswith(".weight") and is_quantized(name):
            parts, meant[name] = case.pack(tensor)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        else:
            stored[name] = meant[name] = tensor
    save_file(stored, quantized / WEIGHTS, metadata={"format": "pt"})
    save_file(meant, plain / WEIGHTS, metadata={"format": "pt"})
    told = json.loads((quantized / "config.json").read_text())
    told["quantization_config"] = case.config
    (quantized / "config.json").write_text(json.dumps(told))
    return quantized, plain


def rounded(weight, bits, group, zero=None):
    """Integers from 0 on, [N, K]; zeros and scales, [N, K / group]; the values that they mean."""
    N, K = weight.shape
    groups = weight.view(N, -1, group)
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    scale = (groups.abs().amax(-1) / (middle - 1)).half().float()
    zeros = torch.full_like(scale, middle) if zero is None else zero(scale)
    q = (groups / scale[..., None] + zeros[..., None]).round().clamp(0, most)
    values = (q - zeros[..., None]) * scale[..., None]
    return q.view(N, K).int(), zeros.int(), scale, values.view(N, K)


def word(numbers, bits):
    """Numbers in a word of 32 bits, the first in the lowest."""
    all_of_them = sum(int(n) << (bits * i) for i, n in enumerate(numbers))
    return all_of_them - (1 << 32 if all_of_them >> 31 else 0)


def words(numbers, bits, order=None):
    """The rows of a matrix in words; zeros follow the last."""
    per = 32 // bits
    order = order or range(per)
    rows = []
    for row in numbers.tolist():
        row += [0] * (-len(row) % per)
        parts = (row[i : i + per] for i in range(0, len(row), per))
        rows.append([word([part[place] for place in order], bits) for part in parts])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def some_zeros(scale):
    """Zero points of asymmetric quantization, the lowest and the highest among them."""
    low, high = 0, 15
    zeros = torch.arange(scale.numel()).view_as(scale) * 5 % 16
    zeros.view(-1)[:2] = torch.tensor([low, high])
    return zeros.float()


def gptq(bits, group, zero=None, less=1, **config):
    def pack(weight):
        q, zeros, scale, values = rounded(weight, bits, group or weight.shape[1], zero)
        stored = (zeros - less) % 2**bits
        parts = {
            "qweight": words(q, bits).T,
            "qzeros": words(stored.T, bits),
            "scales": scale.T.half(),
            "g_idx": (torch.arange(weight.shape[1]) // (group or weight.shape[1])).int(),
        }
        return parts, values

    told = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": zero is None}
    return Case(told | {"desc_act": False} | config, pack)


def awq(group):
    def pack(weight):
        q, zeros, scale, values = rounded(weight, 4, group, some_zeros)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {
            "qweight": words(q.T, 4, order),
            "qzeros": words(zeros.T, 4, order),
            "scales": scale.T.half(),
        }
        return parts, values

    told = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Case(told | {"version": "gemm"}, pack)


def compressed(bits, group, zero=None):
    def pack(weight):
        q, zeros, scale, values = rounded(weight, bits, group or weight.shape[1], zero)
        parts = {
            "weight_packed": words(q, bits),
            "weight_scale": scale.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if zero is not None:
            parts["weight_zero_point"] = words(zeros.T, bits).T
        return parts, values

    return Case(told_compressed("pack-quantized"), pack)


def compressed_bytes(zero=None):
    def pack(weight):
        q, zeros, scale, values = rounded(weight, 8, weight.shape[1], zero)
        parts = {"weight": (q - 128).to(torch.int8), "weight_scale": scale.half()}
        if zero is not None:
            parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return parts, values

    return Case(told_compressed("int-quantized"), pack)


def told_compressed(form):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "int"}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def fp8(block=None, scales=(1,), told=None):
    def pack(weight):
        N, K = weight.shape
        height, width = block or ((N, K) if scales == (1,) else (1, K))
        scale = torch.empty(-(-N // height), -(-K // width))
        values, stored = torch.empty(N, K), torch.empty(N, K, dtype=torch.float8_e4m3fn)
        for i in range(0, N, height):
            for j in range(0, K, width):
                part = weight[i : i + height, j : j + width]
                scale[i // height, j // width] = s = part.abs().max() / 448
                stored[i : i + height, j : j + width] = (part / s).to(torch.float8_e4m3fn)
                values[i : i + height, j : j + width] = (
                    stored[i : i + height, j : j + width].float() * s
                )
        if block:
            return {"weight": stored, "weight_scale_inv": scale}, values
        written = scale.view(-1) if scales == (1,) else scale
        return {"weight": stored, "weight_scale": written}, values

    told = told or {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return Case(told | ({"weight_block_size": list(block)} if block else {}), pack)


CASES = {
    "gptq, 4 bits": gptq(4, 32),
    "gptq, 8 bits": gptq(8, 16),
    "gptq, a scale for a whole row": gptq(4, None),
    "gptq, zero points less one": gptq(4, 32, some_zeros),
    "gptq, zero points as they are": gptq(4, 32, some_zeros, 0, checkpoint_format="gptq_v2"),
    "gptq of the second form that claims to be the first": gptq(4, 32, None, 0),
    "awq": awq(32),
    "compressed-tensors, 4 bits": compressed(4, 32),
    "compressed-tensors, 4 bits, zero points": compressed(4, 16, some_zeros),
    "compressed-tensors, 8 bits": compressed(8, 32),
    "compressed-tensors, a scale for a whole row": compressed(4, None),
    "compressed-tensors, bytes": compressed_bytes(),
    "compressed-tensors, bytes, zero points": compressed_bytes(lambda scale: scale * 0 + 100),
    "compressed-tensors, floats": fp8(scales="rows", told=told_compressed("float-quantized")),
    "fp8, a scale for all": fp8(),
    "fp8, a scale a row": fp8(scales="rows"),
    "fp8, blocks": fp8((32, 16)),
    "fp8, blocks that do not divide": fp8((48, 40)),
}
