"""specserve: an LLM inference engine whose one obsession is latency.

A drafter can change how fast text comes, never which text.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specserve import process
from specserve.version import VERSION as __version__

if TYPE_CHECKING:
    from specserve.async_llm import AsyncLLM
    from specserve.exchange.sampling_params import SamplingParams, Slo, SpeculationParams
    from specserve.generation import CompletionOutput, Output, RequestOutput
    from specserve.llm import LLM
    from specserve.logprobs import Logprob

process.prepare()  # before any module of this package imports torch

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "Output",
    "RequestOutput",
    "SamplingParams",
    "Slo",
    "SpeculationParams",
    "__version__",
]

MODULES = {
    "AsyncLLM": "specserve.async_llm",
    "CompletionOutput": "specserve.generation",
    "LLM": "specserve.llm",
    "Logprob": "specserve.logprobs",
    "Output": "specserve.generation",
    "RequestOutput": "specserve.generation",
    "SamplingParams": "specserve.exchange.sampling_params",
    "Slo": "specserve.exchange.sampling_params",
    "SpeculationParams": "specserve.exchange.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import the engine, and with it torch, on first access."""
    if name in MODULES:
        return getattr(import_module(MODULES[name]), name)
    raise AttributeError(f"module 'specserve' has no attribute {name!r}")
