"""Weights are never resident twice, and the file's pages go as its tensors are packed."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specserve.models import checkpoint
from specserve.models.parse_config import load_config
from specserve.models.quantized.config import parse
from specserve.models.quantized.maps import QuantizedMaps
from specserve.models.tensor_shapes import tensor_shapes
from specserve_kernels import Codes
from tests.checkpoints import tiny_checkpoint

LOAD = """
import sys, torch
from pathlib import Path
from specserve_kernels import load
from specserve.models.loader import load_decoder
from specserve.models.weight import Rounding

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(key))

ops = load(torch.device("cpu"))
load_decoder(Path(sys.argv[1]), "auto", ops)  # what the libraries take at their first use
before = status("VmRSS")
rounding = Rounding.named(sys.argv[3] or None, "w8")
decoder = load_decoder(Path(sys.argv[2]), "auto", ops, rounding=rounding)
print(status("VmHWM") - before, decoder.dtype, decoder.weights.forms.num_bytes)
"""

BIG = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 8192,
}


def widened(folder, dtype, num_layers):
    """Turn a tiny checkpoint into a large one; returns the bytes of its weights."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | BIG | {"num_hidden_layers": num_layers}
    path.write_text(json.dumps(fields | {"layer_types": None}))
    shapes = tensor_shapes(load_config(folder))
    tensors = {name: torch.rand(shape).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return sum(t.numel() * (4 if "norm" in n else t.itemsize) for n, t in tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "quantize", "num_layers"),
    [(torch.bfloat16, "", 5), (torch.float32, "", 2), (torch.bfloat16, "w4", 10)],
)
def test_peak_memory_is_little_more_than_the_weights(dtype, quantize, num_layers, tmp_path):
    small = tiny_checkpoint(tmp_path / "small", dtype=dtype)
    big = tiny_checkpoint(tmp_path / "big")
    size = widened(big, dtype, num_layers)
    command = [sys.executable, "-c", LOAD, str(small), str(big), quantize]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    grown, loaded, kept = done.stdout.split()
    if loaded != str(dtype):
        pytest.skip(f"auto is {loaded} on this CPU")
    assert int(grown) < (1.3 if quantize else 1.2) * int(kept)  # a map is there unrounded, too
    assert int(kept) < 0.4 * size if quantize else int(kept) == size


def test_a_read_tensor_gives_its_pages_back(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.rand(1 << 20)}, path)
    files = checkpoint.Checkpoint(tmp_path)
    files.read("x", torch.empty(1 << 20))
    assert resident_bytes(path) < 1 << 18  # of 1 << 22: the rims of the tensor at most


def stored(size):
    """A map of each format, as large as it needs to be for pages to count."""
    words = torch.zeros(size, size // 4, dtype=torch.int32)
    scale = torch.ones(size, 1)
    told = {"group_size": -1, "bits": 4}
    packed = {"weight_packed": words, "weight_shape": torch.tensor([size, size])}
    nibbles = torch.zeros(size // 8, size, dtype=torch.int32)
    columns = {"qzeros": torch.zeros(1, size // 8, dtype=torch.int32), "scales": scale.T}
    floats = torch.zeros(size, size, dtype=torch.float8_e4m3fn)
    return {
        "compressed-tensors": ({"config_groups": {}}, packed | {"weight_scale": scale}),
        "gptq": (told, columns | {"qweight": nibbles}),
        "awq": (told, columns | {"qweight": nibbles.view(size, -1)}),
        "fp8": ({}, {"weight": floats, "weight_scale": scale}),
    }


@pytest.mark.parametrize("method", stored(8))
def test_a_quantized_map_gives_its_pages_back(tmp_path, method):
    size, path = 1 << 10, tmp_path / "model.safetensors"
    told, tensors = stored(size)[method]
    save_file({f"x.{suffix}": t.contiguous() for suffix, t in tensors.items()}, path)
    quantization = parse({"quantization_config": told | {"quant_method": method}})
    maps = QuantizedMaps(checkpoint.Checkpoint(tmp_path), {"x.weight": (size, size)}, quantization)
    weight = maps.read("x.weight")
    assert not (weight.widen(torch.float32) if isinstance(weight, Codes) else weight).isnan().any()
    assert resident_bytes(path) < 1 << 16  # of 1 << 19 and more: the rims of its tensors


def test_a_large_tensor_is_read_in_pieces(tmp_path, monkeypatch):
    dropped = []
    monkeypatch.setattr(checkpoint, "READ_BYTES", 1 << 12)
    monkeypatch.setattr(checkpoint, "drop_pages", lambda start, size: dropped.append(size))
    save_file({"x": torch.rand(40, 256)}, tmp_path / "model.safetensors")
    checkpoint.Checkpoint(tmp_path).read("x", torch.empty(40, 256))
    assert dropped == [(i << 12) for i in range(1, 11)]


def resident_bytes(path):
    """Of all mappings of a file in this process."""
    total, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split(" ")[0]:
                inside = line.rstrip().endswith(str(path))
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def test_refused_advice_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_madvise", lambda start, length, advice: -1)
    save_file({"x": torch.rand(1 << 14)}, tmp_path / "model.safetensors")
    out = torch.empty(1 << 14)
    checkpoint.Checkpoint(tmp_path).read("x", out)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert torch.equal(out, file.get_tensor("x"))
