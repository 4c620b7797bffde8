"""Writes a checkpoint with quantized weights in the format of compressed-tensors.

Loading the result gives the same bits as loading its source with `model.quantize`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specserve.errors import ConfigError
from specserve.models.experts import is_router
from specserve.models.folder import read_json
from specserve.models.loader import open_reader
from specserve.models.reader import HEAD, Reader
from specserve.models.source import open_source
from specserve.models.tensor_shapes import SCORE
from specserve.models.weight import Rounding
from specserve.models.writing import copy_companions, new_folder, write_json, write_weights
from specserve_kernels import Codes, load
from specserve_kernels.codes import GROUP

CHANNEL = {"strategy": "channel"}


class Form(NamedTuple):
    """The stored form of a linear map."""

    bits: int | None
    rounds_rows: bool

    @property
    def format(self) -> str:
        return "int-quantized" if self.rounds_rows else "pack-quantized"


def module_of(name: str) -> str:
    return name.removesuffix(".weight")


def form_of(reader: Reader, name: str) -> Form:
    module, width = module_of(name), reader.shapes[name][1]
    return Form(reader.bits(name), reader.rounding.rounds_rows(module, width))


def quantize(
    source: Path,
    target: Path,
    rounding: Rounding,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, int]:
    """Write the folder `target`, which must not exist. Return the bytes of its weights and the
    number of maps in 8 bits instead of 4: the group size does not divide their width.
    """
    config = open_source(source).config()
    if config.mixture is not None and config.mixture.style.stacked:
        raise ConfigError(
            f"{source}: quantize cannot write experts that share tensors. Set model.quantize when "
            "you serve the model"
        )
    reader = open_reader(source, config, "auto", load("cpu"), rounding)
    if progress is not None:
        reader.report = progress
    fields = read_json(source / "config.json")
    fields["quantization_config"] = quantization_config(reader)
    if HEAD in reader.shapes:
        fields["tie_word_embeddings"] = False
    with new_folder(target) as folder:
        copy_companions(source, folder)
        sizes = {name: written_bytes(reader, name) for name in reader.shapes}
        write_weights(folder, sizes, lambda name: tensors_of(reader, name))
        write_json(folder / "config.json", fields)
    return sum(sizes.values()), reader.num_odd


def written_bytes(reader: Reader, name: str) -> int:
    """Bytes of a tensor in the new folder; unquantized tensors keep their stored form."""
    if reader.bits(name) is not None:
        return reader.expected_bytes(name)
    module, _, suffix = name.rpartition(".")
    return reader.checkpoint.tensors(module, [suffix])[suffix].nbytes


def tensors_of(reader: Reader, name: str) -> Mapping[str, Tensor]:
    module, _, suffix = name.rpartition(".")
    if reader.bits(name) is None:
        reader.advance(math.prod(reader.shapes[name]))
        return {name: reader.checkpoint.tensors(module, [suffix])[suffix]}
    codes = reader.weight(module)
    assert isinstance(codes, Codes), "the weight must be quantized"
    parts = stored_bytes(codes) if codes.rounds_rows else packed(codes)
    return {f"{module}.{part}": tensor for part, tensor in parts.items()}


def stored_bytes(codes: Codes) -> dict[str, Tensor]:
    """8-bit codes in compressed-tensors' int-quantized format (8-bit weights and activations)."""
    return {
        "weight": (codes.q ^ 128).view(torch.int8),
        "weight_scale": codes.scale.bfloat16(),  # exact: scales are bfloat16 numbers
    }


def packed(codes: Codes) -> dict[str, Tensor]:
    """Codes without zero points in compressed-tensors' pack-quantized format: the first code is in
    the lowest bits of a word.
    """
    per_word = 32 // codes.bits
    q = pad(codes.q, (0, -codes.q.shape[1] % per_word))
    octets = q if codes.bits == 8 else q[:, 0::2] | q[:, 1::2] << 4
    return {
        "weight_packed": octets.contiguous().view(torch.int32),
        "weight_scale": codes.scale.bfloat16(),  # exact: scales are bfloat16 numbers
        "weight_shape": torch.tensor(codes.q.shape),
    }


def quantization_config(reader: Reader) -> dict[str, Any]:
    """The `quantization_config` of config.json; it lists maps that differ from the default form."""
    names = [name for name in reader.shapes if reader.bits(name) is not None]
    modules = {module_of(name): form_of(reader, name) for name in names}
    most = Form(reader.rounding.layers, reader.rounding.with_rows)
    targets: dict[Form, list[str]] = {most: ["Linear"]}
    for module, form in modules.items():
        if form != most or module == "lm_head":  # other programs do not count a head as Linear
            targets.setdefault(form, []).append(module)
    formats = {form.format for form in targets}
    kept = [module_of(n) for n in reader.shapes if is_router(module_of(n)) or n == SCORE]
    groups = {
        f"group_{i}": group_config(form, named, len(formats) > 1)
        for i, (form, named) in enumerate(targets.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*([] if "lm_head" in modules else ["lm_head"]), *kept],
    }


def group_config(form: Form, targets: Sequence[str], is_one_of_several: bool) -> dict[str, Any]:
    """One entry of `config_groups`. `is_one_of_several`: other groups have another format."""
    kind = {"num_bits": form.bits, "type": "int", "symmetric": True}
    strategy = {"strategy": "group", "group_size": GROUP} if form.bits == 4 else CHANNEL
    group: dict[str, Any] = {"targets": targets, "weights": kind | {"dynamic": False} | strategy}
    if form.rounds_rows:
        group["input_activations"] = kind | {"dynamic": True, "strategy": "token"}
    if is_one_of_several:
        group["format"] = form.format
    return group
