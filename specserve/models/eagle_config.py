"""What an EAGLE-3 head's config.json says (Li et al. 2503.01840), in either of two forms.

speculators names `speculators_model_type`, and has the fields of the head's layers in
`transformer_layer_config`. SpecForge, SGLang and vLLM have a Llama's fields with those of the head
among them, or in `eagle_config`.
"""

from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import msgspec

from specserve.errors import ConfigError
from specserve.models import decoder_config
from specserve.models.decoder_config import (
    MAX_SIZE,
    DecoderConfig,
    Shape,
    flag,
    is_int,
    positive,
)
from specserve.models.families import FAMILIES

KIND, LAYERS, NESTED = "speculators_model_type", "transformer_layer_config", "eagle_config"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
OF_LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # by model_type
LLAMA = OF_LAYERS["llama"]
TAPS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OWN = (*FLAGS, TAPS, "draft_vocab_size", "num_aux_hidden_states", "target_hidden_size")
ROPE = (
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
)
ALLOWED: dict[str, tuple[Any, ...]] = {  # of fields that may change what the tensors mean
    "logit_scale": (None, 1),
    "next_layer_regular": (True,),
    "parallel_draft_step": (None, 1),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
}
# Fields that say where a head comes from and how it was trained, or what only counts beside a field
# that is refused.
HARMLESS = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "embed_requires_grad",
    "eos_token_id",
    "initializer_range",
    "max_window_layers",
    "model_type",
    "pad_token_id",
    "parallel_draft_heads_num_layers",
    "pretraining_tp",
    "speculators_config",
    "speculators_version",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


class EagleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a head needs besides its weights."""

    layers: DecoderConfig  # its own; the vocabulary is the target's
    # The target's layers of which the head reads the residual that comes in, ascending:
    # transformers' hidden_states[i].
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool  # the first layer adds to the normalized feature
    norm_before_fc: bool  # of all taps together
    fc_norm: bool  # of each tap
    norm_output: bool  # the next draft step reads normalized rows

    @property
    def width(self) -> int:
        """Of the taps side by side."""
        return len(self.taps) * self.target_hidden_size


def names_head(written: Mapping[str, Any]) -> bool:
    """Whether a config.json is of an EAGLE-3 head, supported or not."""
    named = written.get("architectures")
    is_listed = isinstance(named, list) and bool(named) and named[0] in ARCHITECTURES
    return KIND in written or is_listed


def check_target(folder: Path, config: EagleConfig, target: Shape) -> None:
    """ConfigError unless the head was made for such a target, and its layers can be read."""
    if target.implementation != "native":
        raise ConfigError(
            f"{folder}: a head reads the layers of a target that native code computes, and "
            f"{target.implementation} computes this one; leave the head out"
        )
    sizes = {
        "target_hidden_size": (config.target_hidden_size, "hidden_size", target.hidden_size),
        "vocab_size": (config.layers.vocab_size, "vocab_size", target.vocab_size),
    }
    for key, (has, name, wanted) in sizes.items():
        if has != wanted:
            raise ConfigError(
                f"{folder}/config.json: {key} = {has}, and the target's {name} is {wanted}; take a "
                "head that was trained for this target"
            )
    if config.taps[-1] >= target.num_layers:
        raise ConfigError(
            f"{folder}/config.json: {TAPS} = {list(config.taps)}, and the target has the layers 0 "
            f"to {target.num_layers - 1}; take a head that was trained for this target"
        )


def parse(written: Mapping[str, Any]) -> EagleConfig:
    """ValueError says what cannot be served, and why."""
    fields, of_layers = parts(written)
    layers = decoder_config.parse(of_layers)
    flags = {name: flag({name: False} | fields, name) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ValueError("norm_before_fc and fc_norm are both true, and they exclude each other")
    return EagleConfig(
        layers=layers,
        taps=read_taps(fields),
        target_hidden_size=read_size(fields, "target_hidden_size", layers.hidden_size),
        draft_vocab_size=read_size(
            fields, "draft_vocab_size", layers.vocab_size, layers.vocab_size
        ),
        norm_before_residual=flags["norm_before_residual"],
        norm_before_fc=flags["norm_before_fc"],
        fc_norm=flags["fc_norm"],
        norm_output=flags["norm_output"],
    )


def parts(written: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the head, and those of its layers with the name of their family."""
    return (of_speculators if KIND in written else of_llama)(written)


def of_speculators(written: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `parts`."""
    if written[KIND] != "eagle3":
        raise ValueError(f"{KIND} = {written[KIND]!r} is not supported: only 'eagle3' is")
    check_fields(written, (*OWN, KIND, LAYERS, "tie_word_embeddings"))
    if "norm_before_residual" not in written:  # false to speculators, and true to vLLM
        raise ValueError(
            "norm_before_residual is missing, and programs differ in what that means: add it, "
            "true or false as the head was trained"
        )
    told = table(written, LAYERS)
    model_type = told.get("model_type")
    if not isinstance(model_type, str) or model_type not in OF_LAYERS:
        raise ValueError(
            f"{LAYERS}.model_type = {model_type!r} is not supported: {', '.join(OF_LAYERS)} are"
        )
    return dict(written), layer_fields(told, OF_LAYERS[model_type])


def of_llama(written: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `parts`."""
    if not names_head(written):
        raise ValueError(
            f"architectures = {shortened(written.get('architectures'))} names no EAGLE-3 head: "
            f"{' and '.join(ARCHITECTURES)} do, or {KIND} = 'eagle3'"
        )
    if written.get("model_type", "llama") != "llama":
        raise ValueError(
            f"model_type = {written['model_type']!r} is not supported of "
            f"{written['architectures'][0]}: only 'llama' is"
        )
    nested = table(written, NESTED) if written.get(NESTED) else {}
    check_fields(nested, OWN)
    if nested.get(TAPS) and not written.get(TAPS):
        check_counts_entries(nested[TAPS])
    told = {key: value for key, value in written.items() if key not in (*OWN, NESTED)}
    own = {key: written[key] for key in OWN if key in written}
    return own | nested | {TAPS: own.get(TAPS) or nested.get(TAPS)}, layer_fields(told, LLAMA)


def layer_fields(told: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields of a decoder with the head's layers; ValueError for what would be ignored."""
    check_fields(told, (*FAMILIES[family].defaults, *ROPE))
    return dict(told) | {"architectures": [family]}


def check_fields(fields: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """ValueError for what would be ignored; fields that nobody knows are off if empty."""
    for key, value in fields.items():
        if key in ALLOWED:
            if value not in ALLOWED[key]:
                raise ValueError(
                    f"{key} = {shortened(value)} is not supported: only {ALLOWED[key][-1]} is"
                )
        elif value and key not in known and key not in HARMLESS:
            raise ValueError(f"{key} = {shortened(value)} is not supported of EAGLE-3 heads")


def table(fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = fields.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key} = {shortened(value)} must be an object")
    return value


def read_size(fields: Mapping[str, Any], key: str, missing: int, most: int = MAX_SIZE) -> int:
    return missing if fields.get(key) is None else positive(fields, key, most)


def read_taps(fields: Mapping[str, Any]) -> tuple[int, ...]:
    taps = fields.get(TAPS)
    if not taps:
        raise ValueError(
            f"{TAPS} is missing: list there the layers of the target whose input the head was "
            "trained on, e.g. [2, 18, 33]. They are not guessed, as wrong ones show in nothing but "
            "rejected drafts"
        )
    check_layers(taps)
    number = fields.get("num_aux_hidden_states")
    if number is not None and number != len(taps):
        raise ValueError(f"num_aux_hidden_states = {number!r}, and {TAPS} = {taps} are {len(taps)}")
    return tuple(taps)


def check_layers(taps: Any) -> None:
    is_list = isinstance(taps, list) and all(is_int(layer) and layer >= 0 for layer in taps)
    if not is_list or taps != sorted(set(taps)):
        raise ValueError(f"{TAPS} = {shortened(taps)} must be numbers of layers that ascend")


def check_counts_entries(taps: Any) -> None:
    """ValueError where `eagle_config` has a list that programs read in two ways. One that begins
    with 1 counts outputs of layers to SGLang, and to vLLM the layers that these go into.
    """
    check_layers(taps)
    if taps[0] == 1:
        raise ValueError(
            f"{NESTED}.{TAPS} = {taps} may mean outputs of these layers (SGLang) or inputs (vLLM), "
            f"which is not guessed: add {TAPS} beside {NESTED}, in the first case "
            f"{[layer + 1 for layer in taps]}, in the second {taps}"
        )
