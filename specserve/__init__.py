"""specserve: a low-latency LLM inference engine and server with speculative decoding.

A drafter can change how fast text comes, never which text.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specserve import process
from specserve.version import VERSION as __version__

if TYPE_CHECKING:
    from specserve.api.async_llm import AsyncLLM
    from specserve.api.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from specserve.api.llm import LLM
    from specserve.api.lora import LoRARequest
    from specserve.api.outputs import CompletionOutput, Logprob, Output, RequestOutput
    from specserve.api.pooling import EmbeddingRequestOutput, ScoringRequestOutput
    from specserve.api.vllm_arguments import AsyncEngineArgs, EngineArgs, TextPrompt, TokensPrompt
    from specserve.errors import ConfigError, RequestError
    from specserve.exchange.sampling_params import SamplingParams, Slo, SpeculationParams
    from specserve.text.grammars.structured_outputs import StructuredOutputsParams

process.prepare()  # before any module of this package imports torch

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LoRARequest",
    "Logprob",
    "Output",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "Slo",
    "SpeculationParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

MODULES = {
    "AsyncEngineArgs": "specserve.api.vllm_arguments",
    "AsyncLLM": "specserve.api.async_llm",
    "BeamSearchOutput": "specserve.api.beam_search",
    "BeamSearchParams": "specserve.api.beam_search",
    "BeamSearchSequence": "specserve.api.beam_search",
    "CompletionOutput": "specserve.api.outputs",
    "ConfigError": "specserve.errors",
    "EmbeddingRequestOutput": "specserve.api.pooling",
    "EngineArgs": "specserve.api.vllm_arguments",
    "LLM": "specserve.api.llm",
    "LoRARequest": "specserve.api.lora",
    "Logprob": "specserve.api.outputs",
    "Output": "specserve.api.outputs",
    "RequestError": "specserve.errors",
    "RequestOutput": "specserve.api.outputs",
    "SamplingParams": "specserve.exchange.sampling_params",
    "ScoringRequestOutput": "specserve.api.pooling",
    "Slo": "specserve.exchange.sampling_params",
    "SpeculationParams": "specserve.exchange.sampling_params",
    "StructuredOutputsParams": "specserve.text.grammars.structured_outputs",
    "TextPrompt": "specserve.api.vllm_arguments",
    "TokensPrompt": "specserve.api.vllm_arguments",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access, because its module may import torch."""
    if name in MODULES:
        return getattr(import_module(MODULES[name]), name)
    raise AttributeError(f"module 'specserve' has no attribute {name!r}")
