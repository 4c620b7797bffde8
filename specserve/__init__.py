"""specserve: an LLM inference engine whose one obsession is latency.

A drafter can change how fast text comes, never which text.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specserve import process
from specserve.version import VERSION as __version__

if TYPE_CHECKING:
    from specserve.async_llm import AsyncLLM
    from specserve.errors import ConfigError, RequestError
    from specserve.exchange.sampling_params import SamplingParams, Slo, SpeculationParams
    from specserve.generation import CompletionOutput, Output, RequestOutput
    from specserve.grammars.asked import StructuredOutputsParams
    from specserve.llm import LLM
    from specserve.logprobs import Logprob
    from specserve.lora import LoRARequest
    from specserve.vllm_arguments import AsyncEngineArgs, EngineArgs, TextPrompt, TokensPrompt

process.prepare()  # before any module of this package imports torch

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "LoRARequest",
    "Logprob",
    "Output",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Slo",
    "SpeculationParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

MODULES = {
    "AsyncEngineArgs": "specserve.vllm_arguments",
    "AsyncLLM": "specserve.async_llm",
    "CompletionOutput": "specserve.generation",
    "ConfigError": "specserve.errors",
    "EngineArgs": "specserve.vllm_arguments",
    "LLM": "specserve.llm",
    "LoRARequest": "specserve.lora",
    "Logprob": "specserve.logprobs",
    "Output": "specserve.generation",
    "RequestError": "specserve.errors",
    "RequestOutput": "specserve.generation",
    "SamplingParams": "specserve.exchange.sampling_params",
    "Slo": "specserve.exchange.sampling_params",
    "SpeculationParams": "specserve.exchange.sampling_params",
    "StructuredOutputsParams": "specserve.grammars.asked",
    "TextPrompt": "specserve.vllm_arguments",
    "TokensPrompt": "specserve.vllm_arguments",
}


def __getattr__(name: str) -> Any:
    """Import the engine, and with it torch, on first access."""
    if name in MODULES:
        return getattr(import_module(MODULES[name]), name)
    raise AttributeError(f"module 'specserve' has no attribute {name!r}")
