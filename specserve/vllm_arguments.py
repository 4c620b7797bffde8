"""Arguments of vLLM's `LLM` and `AsyncEngineArgs`: what they are called here, or why they are not.

A script for vLLM passes many that ask for nothing special: those are accepted at the values that
have no effect here.
"""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from specserve.config import ARGUMENTS
from specserve.errors import ConfigError

KV_DTYPES = {"fp8_e4m3": "fp8"}
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # None never has one
    "async_scheduling": (False,),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "disable_custom_all_reduce": (True, False),  # there is one device
    "disable_log_requests": (True,),
    "disable_log_stats": (True,),
    "enable_chunked_prefill": (True,),
    "enable_expert_parallel": (False,),
    "enable_lora": (False,),
    "enforce_eager": (False,),
    "generation_config": ("auto",),
    "load_format": ("auto", "safetensors"),
    "pipeline_parallel_size": (1,),
    "runner": ("auto", "generate"),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate"),
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto", "fast", "hf"),
    "trust_remote_code": (False,),
    "use_tqdm_on_load": (True,),
}
REFUSED = {  # names whose every value is refused -> what to do instead; "" is to leave it out
    **dict.fromkeys(("allowed_local_media_path", "mm_processor_kwargs", "limit_mm_per_prompt"), ""),
    **dict.fromkeys(("attention_config", "compilation_config", "distributed_executor_backend"), ""),
    **dict.fromkeys(("download_dir", "hf_token"), "download the model first"),
    **dict.fromkeys(("hf_overrides", "override_generation_config"), "change the model's files"),
    "chat_template": "put chat_template.jinja into the model's folder",
    "logits_processors": "",
    "quantization": "the checkpoint says what its weights are; `quantize` rounds others",
    "revision": "download it and name its folder",
    "speculative_config": "say drafter and draft_model",
    "swap_space": "",
    "tokenizer_revision": "",
}
WHY = {
    "enforce_eager": "steps on a GPU may be graphs",
    "generation_config": "the model's own is read; give a SamplingParams what shall be otherwise",
    "trust_remote_code": "code that comes with a model is never run",
}


def known_arguments(
    owner: str, model: str | Path | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of vLLM's arguments that are in ARGUMENTS; ConfigError for what cannot be had,
    TypeError for a name that vLLM has not either.
    """
    known = dict[str, Any]()
    for name, value in given.items():
        if name not in {"tokenizer", *ARGUMENTS, *WITHOUT_EFFECT, *REFUSED}:
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}")
        if name in ARGUMENTS:
            known[name] = KV_DTYPES.get(str(value), value) if name == "kv_cache_dtype" else value
        elif value is not None and not is_without_effect(name, value, model):
            why = WHY.get(name) or REFUSED.get(name) or "it has no equal here"
            raise ConfigError(f"{owner}({name}={value!r:.50}): {why}; leave {name} out")
    return known


def is_without_effect(name: str, value: Any, model: str | Path | None) -> bool:
    if name == "tokenizer":
        return model is not None and str(value) == str(model)
    return any(value == none and type(value) is type(none) for none in WITHOUT_EFFECT.get(name, ()))


def seeds_from(owner: str, seed: int | None) -> Random | None:
    """Where requests that give no seed get theirs from, one after the other."""
    if seed is not None and (type(seed) is not int or seed < 0):
        raise ConfigError(f"{owner}(seed={seed!r:.50}): give a number, 0 or more, or leave it out")
    return None if seed is None else Random(seed)
