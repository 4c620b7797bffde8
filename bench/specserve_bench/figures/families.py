"""Steps of each dense model family against Llama's, with the same linear layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specserve.models import parse_config
from specserve.models.families import FAMILIES
from specserve_bench.bound import StepSize
from specserve_bench.figures.steps import Steps, beside
from specserve_bench.random_model import RandomWeights
from specserve_bench.report import extremes_words, markdown_table
from specserve_kernels import load

DENSE = [
    name
    for name, family in FAMILIES.items()
    if family.experts is None and family.recurrent == "none" and not family.has_kinds
]
SIZES = (StepSize("1 row at 512", (512,), 1), StepSize("8 rows at 512", (512,), 8))
SHAPE: dict[str, Any] = {  # Qwen3 0.6B's
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


@torch.inference_mode()
def measure(
    shape: Mapping[str, Any] = SHAPE, sizes: Sequence[StepSize] = SIZES, rounds: int = 7
) -> dict[str, Any]:
    """Milliseconds by family and size, over interleaved rounds, and their ratio to Llama's."""
    made = RandomWeights(load(torch.device("cpu")))
    # The config has windows and no biases, so all families read the same bytes, except those whose
    # MLP has no gate.
    fields = {"attention_bias": False, "mlp_bias": False, "sliding_window": 256, **shape}
    configs = {name: parse_config.parse({"architectures": [name], **fields}) for name in DENSE}
    steps = {n: Steps(made.decoder(c, c.max_positions), n, sizes) for n, c in configs.items()}
    figures = beside(steps, sizes, rounds, "LlamaForCausalLM", "over_llama")
    return {"shape": dict(shape), "rounds": rounds, "steps": figures}


def table(result: Mapping[str, Any]) -> str:
    """Each family's step, and its ratio to Llama's."""
    steps, head = result["steps"], ["family"]
    for step in steps:
        head += [f"{step['step']}, ms", "/ Llama"]
    rows = []
    for name in (name for name in steps[0] if name != "step"):
        rows.append([name.removesuffix("ForCausalLM")])
        for each in (step[name] for step in steps):
            rows[-1] += [f"{each['ms']['median']:.1f}", extremes_words(each["over_llama"])]
    return markdown_table(head, rows)
