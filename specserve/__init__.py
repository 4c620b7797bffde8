"""specserve: an LLM inference engine whose one obsession is latency.

A drafter can change how fast text comes, never which text.
"""

from typing import TYPE_CHECKING, Any

from specserve import process
from specserve.version import VERSION as __version__

if TYPE_CHECKING:
    from specserve.exchange.sampling_params import SamplingParams
    from specserve.generation import Output
    from specserve.llm import LLM

process.prepare()  # before any module of this package imports torch

__all__ = ["LLM", "Output", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the engine, and with it torch, on first access."""
    if name == "LLM":
        from specserve.llm import LLM

        return LLM
    if name == "Output":
        from specserve.generation import Output

        return Output
    if name == "SamplingParams":
        from specserve.exchange.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'specserve' has no attribute {name!r}")
