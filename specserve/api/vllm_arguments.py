"""Arguments of vLLM's `LLM` and `AsyncEngineArgs`: maps, ignores or refuses them.

Scripts for vLLM pass many arguments with default values. specserve accepts the values that have no
effect in specserve.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NotRequired, TypedDict

from specserve.config import ARGUMENTS, USUAL_LORAS
from specserve.errors import ConfigError, RequestError
from specserve.exchange.sampling_params import is_one_of, unexpected_argument

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # argument -> values; None is always accepted
    "async_scheduling": (False,),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none", "embed"),  # the model's files tell what it can do
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "disable_custom_all_reduce": (True, False),  # there is one device
    "disable_log_requests": (True,),
    "disable_log_stats": (True,),
    "disable_sliding_window": (False,),
    "enable_chunked_prefill": (True,),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (True, False),
    "enforce_eager": (False,),
    "generation_config": ("auto",),
    "fully_sharded_loras": (False,),
    "lora_dtype": ("auto",),
    "load_format": ("auto", "safetensors"),
    "logits_processors": ([], ()),
    "logprobs_mode": ("raw_logprobs",),
    "max_logprobs": (20,),
    "runner": ("auto", "generate", "pooling"),
    "scheduling_policy": ("fcfs", "priority"),  # by priority, then in order of arrival
    "skip_tokenizer_init": (False,),
    "swap_space": (0, 4),  # specserve does not swap; 4 is vLLM's default
    "tokenizer_mode": ("auto", "fast", "hf"),
    "trust_remote_code": (True, False),  # specserve never runs code of a checkpoint
    "use_tqdm_on_load": (True,),
}
REFUSED = {  # arguments refused at every value -> remedy; "": omit it
    **dict.fromkeys(("additional_config", "cuda_graph_sizes", "hf_config_path"), ""),
    **dict.fromkeys(("kv_events_config", "kv_transfer_config"), ""),
    **dict.fromkeys(("max_seq_len_to_capture", "num_gpu_blocks_override", "pooler_config"), ""),
    **dict.fromkeys(("rope_scaling", "rope_theta"), "change the model's files"),
    **dict.fromkeys(("reasoning_parser", "structured_outputs_config", "worker_cls"), ""),
    **dict.fromkeys(("allowed_local_media_path", "mm_processor_kwargs", "limit_mm_per_prompt"), ""),
    **dict.fromkeys(("attention_config", "compilation_config", "distributed_executor_backend"), ""),
    "download_dir": "set the environment variable HF_HUB_CACHE",
    "hf_token": "set the environment variable HF_TOKEN",
    **dict.fromkeys(("hf_overrides", "override_generation_config"), "change the model's files"),
    "max_cpu_loras": "adapters without a slot are read from their files again",
    "logits_processors": "pass them to LLM.generate(..., logits_processors=[...])",
    "quantization": "the checkpoint defines the format; `quantize` rounds unquantized weights",
    "revision": "download the revision and pass its folder",
    "served_model_name": "use the option of `specserve serve`",
    "speculative_config": "set drafter, and draft_model or draft_head",
    "tokenizer_revision": "",
}
TASKS = {"generate": "auto", "score": "rank"}  # vLLM's tasks -> values of model.task
WHY = {
    "enforce_eager": "steps on a GPU may use CUDA graphs",
    "generation_config": "the model's file is always read; a SamplingParams overrides it",
}
CALLS: dict[str, tuple[tuple[Any, ...], str]] = {  # arguments of calls -> ignored values, remedy
    "chat_template": ((), "pass a file to LLM(chat_template=...)"),
    "chat_template_content_format": (("auto",), "the model's template determines it"),
    "data_parallel_rank": ((), "there is only one engine"),
    "guided_options_request": ((), "use SamplingParams(structured_outputs=...)"),
    "logits_processors": (([], ()), "the engine runs in another process; call LLM.generate"),
    "mm_processor_kwargs": ((), "only text is supported"),
    "priority": ((0,), "use SamplingParams(priority=...)"),
    "tokenization_kwargs": ((), "use SamplingParams(truncate_prompt_tokens=...)"),
    "trace_headers": ((), "the Python API does not trace"),
}


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]  # the text, which outputs repeat


class EngineArgs(SimpleNamespace):
    """Arguments of `LLM` or `AsyncLLM`, for `LLM(**vars(args))` or `AsyncLLM.from_engine_args`."""


class AsyncEngineArgs(EngineArgs):
    pass


def known_arguments(
    owner: str, model: str | Path | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the vLLM arguments that are in ARGUMENTS.

    ConfigError for unsupported arguments or values, TypeError for unknown names.
    """
    known = dict[str, Any]()
    others = "tokenizer", "set", "config", "seed", "enable_lora"
    names = [*ARGUMENTS, *WITHOUT_EFFECT, *REFUSED, *others]
    for name, value in given.items():
        if name not in names:
            raise unexpected_argument(owner, name, names)
        if name == "task":
            known[name] = TASKS.get(value, value) if isinstance(value, str) else value
        elif name in ARGUMENTS:
            is_fp8 = name == "kv_cache_dtype" and value == "fp8_e4m3"  # vLLM's longer name
            known[name] = "fp8" if is_fp8 else value
        elif name == "enable_lora":
            is_default = given.get("max_loras") is given.get("lora_modules") is None
            known |= {"max_loras": USUAL_LORAS} if value is True and is_default else {}
        elif not is_ignored(name, value, model, given.get("device")):
            why = WHY.get(name) or REFUSED.get(name) or "specserve has no equivalent"
            raise ConfigError(f"{owner}({name}={value!r:.50}): {why}. Omit {name}")
    return known


SERVE_FLAGS = {  # flags of `vllm serve` that have another form here -> remedy
    "api_key": "write the key to a file and pass --api-key-file FILE",
    "model": "name the model without a flag: specserve serve MODEL",
    "speculative_config": "use --drafter, and --draft-model or --draft-head",
}


def flag_words(flags: Iterable[str]) -> str:
    """Return a line with the remedy for each flag of `vllm serve` that specserve lacks."""
    lines = ""
    for flag in flags:
        name, remedy = flag.partition("=")[0], ""
        argument = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--"):
            continue
        if argument in SERVE_FLAGS:
            remedy = SERVE_FLAGS[argument]
        elif argument in ARGUMENTS:
            remedy = f"use --set {ARGUMENTS[argument]}=..."
        elif argument in REFUSED or argument in WITHOUT_EFFECT:
            remedy = REFUSED.get(argument) or "specserve has no equivalent"
        lines += f"\n{name}: {remedy}" if remedy else ""
    return lines


def is_ignored(name: str, value: Any, model: str | Path | None, device: str | None) -> bool:
    """Whether an argument of vLLM has no effect in specserve at this value."""
    if name == "tokenizer" and model is not None and str(value) == str(model):
        return True
    if name == "enforce_eager" and value is True:
        import torch  # not at the top: the process of AsyncLLM otherwise runs without torch

        return device == "cpu" or not torch.cuda.is_available()
    return value is None or is_one_of(value, WITHOUT_EFFECT.get(name, ()))


def check_call(owner: str, given: Mapping[str, Any]) -> None:
    """RequestError for unsupported arguments of vLLM's calls, TypeError for unknown names."""
    for name, value in given.items():
        if name not in CALLS:
            raise unexpected_argument(owner, name, [*CALLS, "lora_request"])
        without_effect, why = CALLS[name]
        if value is not None and not is_one_of(value, without_effect):
            raise RequestError(f"{name}={value!r:.50}: {why}. Omit {name}", name)
