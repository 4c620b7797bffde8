"""The pairs of models that figures are measured on."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.models.writing import write_json
from specserve_bench import mixtures
from specserve_bench.demo.scaled_model import SHAPES, shape_name
from specserve_bench.scale import scale_model

Pair = tuple[Path, Path]  # target and draft model
# 8 of 64 experts: a row reads 0.4 GB, as that of `mixtures` does. An expert has room for the demo's
# MLP, so there are fewer layers.
MIXTURE = mixtures.SHAPE | {
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 6,
}
MIXTURE_DRAFT = SHAPES["qwen3-0.6b-draft"] | {"vocab_size": MIXTURE["vocab_size"]}


def demo_pair() -> Pair:
    return DEMO_TARGET, DEMO_DRAFT


def large_pair() -> Pair:
    """The demo pair at the cost of a 0.6B model and its draft model."""
    return scaled(DEMO_TARGET, "qwen3-0.6b"), scaled(DEMO_DRAFT, "qwen3-0.6b-draft")


def mixture_pair() -> Pair:
    """The demo pair at the cost of a mixture of experts and a draft model for it.

    Experts are chosen at random, but by the demo's own hidden values. In its held-out text, 4 rows
    that follow each other have 2.7 times the experts of one, 8 rows 3.9 times, 16 rows 5.0 times;
    independent choices would have 3.3, 5.2 and 7.1 times as many. Near rows share experts, as those
    of trained mixtures do.
    """
    target = scaled(DEMO_TARGET, shape_folder("mixture", MIXTURE))
    return target, scaled(DEMO_DRAFT, shape_folder("mixture-draft", MIXTURE_DRAFT))


def shape_folder(name: str, shape: Mapping[str, Any]) -> str:
    folder = Path(".models", "shapes", name)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", shape)
    return str(folder)


def scaled(source: Path, shape: str) -> Path:
    target = Path(".models", f"{source.name}-{shape_name(shape)}")
    shutil.rmtree(target, ignore_errors=True)
    scale_model(source, target, shape)
    return target


PAIRS: dict[str, Callable[[], Pair]] = {
    "demo": demo_pair,
    "0.6b": large_pair,
    "mixture": mixture_pair,
}
