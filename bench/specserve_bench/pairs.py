"""Models that figures are measured on: pairs of target and draft, and random weights."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.models import decoder_config
from specserve_bench.demo.scaled_model import SHAPES, shape_name
from specserve_bench.scale import scale_model

MODELS = Path(".models")
LONG = 40_960  # positions
EXPERTS: dict[str, Any] = {  # 8 of 64 experts: a row reads 0.4 GB
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 10,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 16384,
}


def mixture_pair() -> tuple[Path, Path]:
    """The demo models, padded to the compute of a mixture of experts and its draft model.

    An expert has room for the demo's MLP, so there are fewer layers than in EXPERTS. Routers have
    random weights and read the demo's hidden states. On held-out text, 4 adjacent rows use 2.7
    times the experts of one row, 8 rows 3.9 times, and 16 rows 5.0 times. Independent choices
    would use 3.3, 5.2 and 7.1 times as many. In trained mixtures, adjacent rows share experts, too.
    """
    width = {"intermediate_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 6}
    draft = SHAPES["qwen3-0.6b-draft"] | {"vocab_size": EXPERTS["vocab_size"]}
    shapes = MODELS / "shapes"
    return (
        scaled(DEMO_TARGET, shape_folder(shapes / "mixture", EXPERTS | width)),
        scaled(DEMO_DRAFT, shape_folder(shapes / "mixture-draft", draft)),
    )


def shape_folder(folder: Path, fields: Mapping[str, Any]) -> str:
    """A folder with a config.json, which `scale_model` takes as a shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def scaled(source: Path, shape: str, models: Path = MODELS, keeps: bool = False) -> Path:
    """The scaled checkpoint's folder, written anew unless `keeps`."""
    target = models / f"{source.name}-{shape_name(shape)}"
    if not (keeps and (target / "config.json").exists()):
        shutil.rmtree(target, ignore_errors=True)  # an interrupted run leaves parts
        scale_model(source, target, shape)
    return target


def long_pair() -> tuple[Path, Path]:
    """The pair of 0.6B compute with room for prompts of 32,000 tokens. The demo models were trained
    on shorter ones, so their text is poor there; times are those of the shape.
    """
    target, draft = map(lengthened, (DEMO_TARGET, DEMO_DRAFT))
    models = target.parent
    return scaled(target, "qwen3-0.6b", models), scaled(draft, "qwen3-0.6b-draft", models)


def lengthened(source: Path) -> Path:
    """A copy of a demo model that takes LONG positions."""
    target = MODELS / "long" / source.name
    shutil.copytree(source, target, dirs_exist_ok=True)
    fields = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": LONG}
    (target / "config.json").write_text(json.dumps(fields))
    return target


PAIRS: dict[str, Callable[[], tuple[Path, Path]]] = {  # target and draft model
    "demo": lambda: (DEMO_TARGET, DEMO_DRAFT),
    "0.6b": lambda: (scaled(DEMO_TARGET, "qwen3-0.6b"), scaled(DEMO_DRAFT, "qwen3-0.6b-draft")),
    "0.6b-long": long_pair,
    "mixture": mixture_pair,
}


def random_checkpoint(
    name: str = "qwen3-0.6b", fields: Mapping[str, Any] = SHAPES["qwen3-0.6b"]
) -> Path:
    """Random weights in bfloat16 of a shape, given as the fields of its config.json; without a
    tokenizer. They are made once.
    """
    folder = MODELS / f"{name}-random"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        tensor: torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for tensor, size in decoder_config.tensor_shapes(decoder_config.parse(dict(fields))).items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(fields)))
    return folder
