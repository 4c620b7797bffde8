"""Small random adapters in peft's format, written without peft."""

import json

import torch
from safetensors.torch import save_file

from specserve.models.adapters import fused_maps
from specserve.models.parse_config import load_config

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder, base, seed=0, rank=4, modules=ALL, scale=1.0, **fields):
    """An adapter of the model in `base`; the larger `scale`, the more it changes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = load_config(base)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for parts in fused_maps(config, layer).values():
            for module, height, width in parts:
                if module.rpartition(".")[2] in modules:
                    shapes = {"A": (rank, width), "B": (height, rank)}
                    for matrix, shape in shapes.items():
                        name = f"base_model.model.{module}.lora_{matrix}.weight"
                        tensors[name] = torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": scale, "target_modules": [*modules]}
    (folder / "adapter_config.json").write_text(json.dumps(told | fields))
    return folder
