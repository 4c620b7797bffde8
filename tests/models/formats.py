"""Tiny checkpoints whose linear maps stand as other people's libraries stored them."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specserve.models.checkpoint import Checkpoint
from specserve.models.parse_config import load_config
from specserve.models.quantized.maps import QuantizedMaps
from specserve.models.tensor_shapes import tensor_shapes
from specserve_kernels import Codes
from tests.checkpoints import tiny_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"  # write.py made them
FORMATS = json.loads((FIXTURES / "formats.json").read_text())["formats"]
WEIGHTS, LAYER = "model.safetensors", "model.layers.0"


def quantized(folder, name, edit=lambda tensors: None, told=(), **fields):
    """A Qwen3 with the maps of a fixture; its other weights are random.

    `edit` may change its tensors, `told` its quantization_config; `fields` are of its config.json.
    """
    tiny_checkpoint(folder, **FORMATS[name]["shape"] | fields)
    tensors = load_file(folder / WEIGHTS)
    for module in FORMATS[name]["values"]:
        tensors.pop(f"{module}.weight")
    tensors |= load_file(FIXTURES / f"{name}.safetensors")
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    change_config(folder, quantization_config=FORMATS[name]["quantization_config"] | dict(told))
    return folder


def weights_only(name):
    """The quantization_config of a fixture, but that no activations are quantized."""
    told = FORMATS[name]["quantization_config"]
    groups = told.get("config_groups", {})
    without = {key: group | {"input_activations": None} for key, group in groups.items()}
    return told | ({"config_groups": without} if groups else {})


def plain(folder, source):
    """The same checkpoint with the values that its maps mean, in float32."""
    tiny_checkpoint(folder)  # its tokenizer
    meant = values(source)
    for name, tensor in load_file(source / WEIGHTS).items():
        if name.rpartition(".")[0] not in meant:
            meant[name.removesuffix(".weight")] = tensor.float()
    stored = {f"{name}.weight": tensor.contiguous() for name, tensor in meant.items()}
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    change_config(folder, quantization_config=None)
    return folder


def change_config(folder, **fields):
    """None takes a field out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def values(folder, dtype=torch.float32):
    """What the quantized maps of a folder mean, by module."""
    config, checkpoint = load_config(folder), Checkpoint(folder)
    shapes = tensor_shapes(config)
    if "lm_head" in checkpoint.suffixes:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    maps = QuantizedMaps(checkpoint, shapes, config.quantization)
    checkpoint.check(maps.expected)
    weights = {name.removesuffix(".weight"): maps.read(name) for name in maps.shapes}
    return {
        module: weight.widen(dtype) if isinstance(weight, Codes) else weight.to(dtype)
        for module, weight in weights.items()
    }


def digests(tensors):
    """As those in formats.json."""
    return {
        name: hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()[:16]
        for name, tensor in tensors.items()
    }
