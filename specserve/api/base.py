"""The common base of `LLM` and `AsyncLLM`: arguments, parameters, and changes of drafters."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Generic, NamedTuple, TypeVar

from specserve.api.lora import AdapterNames, LoRARequest
from specserve.api.vllm_arguments import known_arguments
from specserve.config import Config, python_config
from specserve.errors import ConfigError
from specserve.exchange.sampling_params import MAX_SEED, Sampling, SamplingParams
from specserve.exchange.speculation_control import SpeculationControl, change_of
from specserve.models import preflight
from specserve.models.preflight import Folders
from specserve.models.selection import served_name
from specserve.text.chat_template import ChatOptions

Prompt = str | Sequence[int] | Mapping[str, Any]
Lora = str | LoRARequest | None
ChangeResult = TypeVar("ChangeResult")  # what a change returns: None, or a coroutine


class Resolved(NamedTuple):
    """A caller's parameters, and their resolved values for a prompt of one token."""

    params: SamplingParams
    sampling: Sampling


class BaseLLM(Generic[ChangeResult]):
    """The settings of an LLM, and how callers change them."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        vllm: Mapping[str, Any],
        config: str | Path | Sequence[str | Path] | None,
        set: Mapping[str, Any] | None,
        seed: int | None,
    ) -> None:
        owner = type(self).__name__
        given = {**vllm, "lora_modules": arguments["lora_modules"]}
        known = known_arguments(owner, arguments["model"], given)
        self.config = python_config(owner, {**known, **arguments}, config, set)
        if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
            raise ConfigError(
                f"{owner}(seed={seed!r:.50}): not a signed 64-bit integer. Pass one, or omit it"
            )
        # Random uses the absolute value of a negative number.
        self.seeds = None if seed in (None, -1) else Random(seed % 2**64)
        self.adapters = AdapterNames(self.config, served_name(self.config))

    def check_files(self) -> Folders:
        """Check the files of all models before loading. ConfigError if one cannot be used."""
        folders = preflight.check(self.config)
        self.speculation_control = SpeculationControl(self.config)
        return folders

    def changed_to(self, find: Callable[[], Config]) -> Config:
        """Return the config that `find` returns, after a check of its files."""
        config = find()
        preflight.check(config)
        return config

    def change(self, find: Callable[[], Config]) -> ChangeResult:
        """Change to the config that `find` returns; it may read files."""
        raise NotImplementedError

    def change_speculation(
        self,
        *,
        drafter: str | None = None,
        sources: Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
        max_nodes: int | None = None,
        max_step_nodes: int | None = None,
    ) -> ChangeResult:
        """Change drafters or limits from the next step on. Running requests keep their output.

        An unset argument changes nothing. The value None of an option restores its default.
        ConfigError, with nothing changed, if the change is invalid.
        """
        change = change_of(drafter, sources, options, max_nodes, max_step_nodes)
        return self.change(lambda: self.speculation_control.changed(change))

    def load_draft_model(self, model: str | Path, quantize: str | None = None) -> ChangeResult:
        """Replace the draft model. Steps continue while it is loaded.

        `quantize` accepts the values of `draft_quantize` of `LLM`. ConfigError, with nothing
        changed, if the model cannot be used.
        """
        return self.change(lambda: self.speculation_control.with_draft_model(str(model), quantize))

    def unload_draft_model(self) -> ChangeResult:
        """Remove the draft model, and free its memory."""
        return self.change(lambda: self.speculation_control.without_draft_model())

    def seed_of(self, params: SamplingParams) -> int | None:
        """Return the caller's seed, else the next one from the LLM's seed; None without both."""
        if params.own_seed is not None or self.seeds is None:
            return params.own_seed
        return self.seeds.randrange(MAX_SEED)


def chat_options(
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    chat_template_kwargs: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
) -> ChatOptions:
    """Return the template options for the arguments of a method `chat`."""
    kwargs = dict(chat_template_kwargs or {})
    functions = [dict(tool) for tool in tools or ()]
    return ChatOptions(add_generation_prompt, continue_final_message, kwargs, functions)
