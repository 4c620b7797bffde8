"""Writing a checkpoint with its weights rounded to codes, in the format of compressed-tensors.

Loading it gives the same bits as loading its source with `model.quantize`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specserve.models.folder import read_json
from specserve.models.loader import HEAD, Progress, Reader, open_reader
from specserve.models.rounding import Rounding
from specserve.models.source import open_source
from specserve.models.writing import copy_companions, new_folder, write_json, write_weights
from specserve_kernels import Codes, load
from specserve_kernels.quantize import GROUP


def quantize(
    source: Path, target: Path, rounding: Rounding, progress: Progress | None = None
) -> tuple[int, int]:
    """Write `target`, a folder that must not be there. The bytes of its weights, and the number of
    maps that have 8 bits instead of 4, as no group divides their width.
    """
    config = open_source(source).config()
    reader = open_reader(source, config, "auto", load("cpu"), rounding)
    if progress is not None:
        reader.report = progress
    fields = read_json(source / "config.json")
    fields["quantization_config"] = quantization_config(reader)
    if HEAD in reader.shapes:
        fields["tie_word_embeddings"] = False
    with new_folder(target) as folder:
        copy_companions(source, folder)
        sizes = {name: reader.expected_bytes(name) for name in reader.shapes}
        write_weights(folder, sizes, lambda name: tensors_of(reader, name))
        write_json(folder / "config.json", fields)
    return sum(sizes.values()), reader.num_odd


def tensors_of(reader: Reader, name: str) -> Mapping[str, Tensor]:
    module, _, suffix = name.rpartition(".")
    if reader.bits(name) is None:
        reader.advance(math.prod(reader.shapes[name]))
        return {name: reader.checkpoint.tensors(module, [suffix])[suffix]}
    codes = reader.weight(module)
    assert isinstance(codes, Codes), "it is to be rounded"
    return {f"{module}.{part}": tensor for part, tensor in packed(codes).items()}


def packed(codes: Codes) -> dict[str, Tensor]:
    """Codes without zeros as compressed-tensors packs them: the first in a word's lowest bits."""
    per_word = 32 // codes.bits
    q = pad(codes.q, (0, -codes.q.shape[1] % per_word))
    octets = q if codes.bits == 8 else q[:, 0::2] | q[:, 1::2] << 4
    return {
        "weight_packed": octets.contiguous().view(torch.int32),
        "weight_scale": codes.scale.bfloat16(),  # they are such numbers
        "weight_shape": torch.tensor(codes.q.shape),
    }


def quantization_config(reader: Reader) -> dict[str, Any]:
    """What config.json says of the maps: those that differ from most are named."""
    names = [name for name in reader.shapes if reader.bits(name) is not None]
    modules = {name.removesuffix(".weight"): reader.bits(name) for name in names}
    most = reader.rounding.layers
    targets: dict[int | None, list[str]] = {most: ["Linear"]}
    for module, bits in modules.items():
        if bits != most or module == "lm_head":  # others take a head for no Linear
            targets.setdefault(bits, []).append(module)
    groups = {
        f"group_{i}": {"targets": named, "weights": weights_config(bits)}
        for i, (bits, named) in enumerate(targets.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [] if "lm_head" in modules else ["lm_head"],
    }


def weights_config(bits: int | None) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": GROUP} if bits == 4 else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **strategy}
