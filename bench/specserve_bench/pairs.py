"""The pairs of models that figures are measured on."""

import shutil
from collections.abc import Callable
from pathlib import Path

from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve_bench.scale import scale_model

Pair = tuple[Path, Path]  # target and draft model


def demo_pair() -> Pair:
    return DEMO_TARGET, DEMO_DRAFT


def large_pair() -> Pair:
    """The demo pair at the cost of a 0.6B model and its draft model."""
    return scaled(DEMO_TARGET, "qwen3-0.6b"), scaled(DEMO_DRAFT, "qwen3-0.6b-draft")


def scaled(source: Path, shape: str) -> Path:
    target = Path(".models", f"{source.name}-{shape}")
    shutil.rmtree(target, ignore_errors=True)
    scale_model(source, target, shape)
    return target


PAIRS: dict[str, Callable[[], Pair]] = {"demo": demo_pair, "0.6b": large_pair}
