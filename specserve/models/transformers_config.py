"""The shape of a model that transformers' modules run, and checks for unsupported models.

Does not import transformers, which would slow down every start. Its table of models is parsed from
its source file.
"""

import ast
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from specserve.errors import ConfigError
from specserve.models import parse_config, rope
from specserve.models.config_fields import MAX_LAYERS, positive
from specserve.models.decoder_config import Shape
from specserve.models.multimodal_families import MULTIMODAL
from specserve.models.parse_config import ARCHITECTURES, head_shape
from specserve.models.recurrent import WITH_STATE

FILE, TABLE = "transformers/models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
OTHER_NAMES = {  # names of fields in configs of older models
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "n_ctx"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}
ATTENTION = ("full_attention", "sliding_attention")  # supported layer types
# Fields of models with a recurrent state, which rejected draft tokens would change.
STATES = (
    "attn_layer_period",
    "conv_kernel",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_conv",
    "mamba_d_state",
    "state_size",
)
RECURRENT = ("mamba", "recurrent", "rwkv", "xlstm")  # substrings of model types
PARTS = ("text_config", "vision_config", "audio_config")
# RoPE types whose frequencies in transformers depend on the longest text of a step.
STEPWISE_ROPE = ("dynamic", "longrope", "su")


class TransformersShape(Shape, frozen=True, kw_only=True):
    """The shape of a model that transformers runs."""

    implementation = "transformers"


@cache
def causal_models() -> Mapping[str, str]:
    """The class of each causal language model in transformers, by model type. Empty if the table is
    not found; then loading the model raises the error.
    """
    path = Path(str(distribution("transformers").locate_file(FILE)))
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == TABLE:
                return dict(ast.literal_eval(node.value.args[0]))
    return {}


def parse(written: Mapping[str, Any]) -> TransformersShape:
    """The shape that a config.json describes. Raises ValueError for unsupported models."""
    architecture = find_architecture(written)
    refuse(written)
    fields = dict(written)
    for name, others in OTHER_NAMES.items():
        known = [fields[other] for other in (name, *others) if fields.get(other) is not None]
        fields[name] = known[0] if known else None
    for name in ("head_dim", "num_key_value_heads"):
        fields.setdefault(name, None)
    heads, kv_heads, head_dim = head_shape(fields)
    max_positions = positive(fields, "max_position_embeddings")
    hidden = positive(fields, "hidden_size")
    inner = fields["intermediate_size"]
    if inner is None:
        fields["intermediate_size"] = 4 * hidden
    elif isinstance(inner, list) and inner:  # by layer
        fields["intermediate_size"] = inner[0]
    return TransformersShape(
        architecture=architecture,
        num_layers=positive(fields, "num_hidden_layers", MAX_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=positive(fields, "intermediate_size"),
        vocab_size=positive({"vocab_size": None, **fields}, "vocab_size"),
        max_positions=rope.longest_text(fields, max_positions, {}),
        quantization=None,
    )


def find_architecture(written: Mapping[str, Any]) -> str:
    named, kind = written.get("architectures"), written.get("model_type")
    architecture = named[0] if isinstance(named, list) and named else named
    if not isinstance(architecture, str) or not isinstance(kind, str):
        raise ValueError(
            f"architectures = {named!r} and model_type = {kind!r} must name the architecture"
        )
    known = causal_models()
    if known and known.get(kind) != architecture:
        raise ValueError(
            f"architectures = {named!r} is not supported. Native code supports "
            f"{', '.join(ARCHITECTURES)}. In transformers, {without(written)}"
        )
    return architecture


def without(written: Mapping[str, Any]) -> str:
    """The reason why transformers cannot run a model."""
    if written.get("is_encoder_decoder"):
        return "models with an encoder are not supported"
    if any(part in written for part in PARTS):
        return "only text models run, without images or sound"
    if "auto_map" in written:
        return "code from a checkpoint (auto_map) is never run"
    return (
        f"version {version('transformers')} has no decoder of this name for "
        f"model_type = {written['model_type']!r}"
    )


def refuse(written: Mapping[str, Any]) -> None:
    """Raise ValueError for models that config.json shows to be unsupported."""
    kind, types = str(written["model_type"]), written.get("layer_types") or ()
    if written.get("is_encoder_decoder"):
        raise ValueError("is_encoder_decoder = true: only decoders are supported")
    for part in PARTS:
        if part in written:
            raise ValueError(
                f"{part}: in transformers, only text models run. Native code runs the text models "
                f"of {', '.join(MULTIMODAL)}"
            )
    if other := [name for name in types if name not in ATTENTION]:
        raise ValueError(f"layer type {other[0]!r} is not supported, only {', '.join(ATTENTION)}")
    states = [name for name in STATES if written.get(name) is not None]
    if states or any(part in kind for part in RECURRENT):
        told = states[0] if states else f"model_type = {kind!r}"
        raise ValueError(f"{told}: layers with a recurrent state are not supported")
    refuse_attention(written)
    if "quantization_config" in written:
        raise ValueError(
            "quantization_config: quantized weights are supported only for architectures of the "
            "native code. Use the unquantized model, and set model.quantize"
        )


def refuse_attention(written: Mapping[str, Any]) -> None:
    """Raise ValueError for attention that the kernels do not support."""
    if written.get("kv_lora_rank") is not None:
        raise ValueError("kv_lora_rank: latent attention (MLA) is not supported")
    values, keys = written.get("v_head_dim"), written.get("head_dim")
    if values is not None and values != keys:
        raise ValueError(f"v_head_dim = {values!r} must equal head_dim = {keys!r}")
    if written.get("attention_chunk_size") is not None:
        raise ValueError(
            "attention_chunk_size: only native code supports chunked attention, for Llama 4"
        )
    for name in ("rope_parameters", "rope_scaling"):
        if kind := stepwise_rope(written.get(name)):
            raise ValueError(
                f"{name}: rope_type {kind!r} depends on the longest text of a step in "
                "transformers, so that only native code supports it"
            )


def stepwise_rope(parameters: Any) -> str | None:
    """The RoPE type if it is in STEPWISE_ROPE, else None. Parameters may be grouped by layer
    type.
    """
    if not isinstance(parameters, Mapping):
        return None
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind in STEPWISE_ROPE:
        return str(kind)
    return next(filter(None, map(stepwise_rope, parameters.values())), None)


def has_state(written: Mapping[str, Any]) -> bool:
    """Whether config.json has fields or types of recurrent layers."""
    kinds = written.get("layer_types")
    has_kind = isinstance(kinds, list) and any(kind in WITH_STATE for kind in kinds)
    return has_kind or any(written.get(name) is not None for name in STATES)


def parse_any(written: dict[str, Any], implementation: str) -> Shape:
    """The shape for an implementation; auto is native if that supports the architecture."""
    is_native = implementation == "native" or parse_config.names_family(written)
    if not is_native or implementation == "transformers":
        if parse_config.names_family(written) and has_state(written):
            raise ConfigError(
                "model.implementation = transformers: layers with a recurrent state run in native "
                "code only. Remove this setting"
            )
        return parse(written)
    try:
        return parse_config.parse(written)
    except parse_config.Unsupported as e:
        parse(written)  # raises if transformers does not support the model either
        raise ValueError(f"{e}. Try model.implementation = 'transformers'") from e
