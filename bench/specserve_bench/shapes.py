"""Random checkpoints in the shapes of known models: real cost, meaningless text."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from specserve.models import decoder_config
from specserve_bench.demo.scaled_model import SHAPES, shape_config


def random_checkpoint(shape: str, folder: Path) -> Path:
    """Weights of the shape, without a tokenizer; made once."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for name, size in decoder_config.tensor_shapes(shape_config(shape)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder
