"""Parses the fields of config.json by which layers differ: windows, RoPE, heads and streams."""

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from specserve.models.config_fields import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_SIZE,
    flag,
    is_int,
    natural,
    positive,
)
from specserve.models.decoder_config import KVHeads
from specserve.models.family import Family

MAX_STREAMS = 8  # limit of the kernels, in streams.cpp


def layer_kinds(
    fields: Mapping[str, Any],
    family: Family,
    windows: tuple[int | None, ...],
    heads: int,
    local: KVHeads,
) -> dict[str, Any]:
    """The fields of DecoderConfig by which layers differ in their heads, KV and MLP."""
    if not family.has_kinds:
        return {}
    num_shared = natural(fields, "num_kv_shared_layers")
    own = windows[: len(windows) - num_shared]
    if num_shared and set(own) != set(windows):
        raise ValueError(
            f"num_kv_shared_layers = {num_shared} leaves no layer whose KV the last layers can read"
        )
    return {
        "global_heads": global_heads(fields, windows, heads, local),
        "has_equal_values": flag(fields, "attention_k_eq_v"),
        "num_shared_layers": num_shared,
        "shared_mlp_factor": 2 if flag(fields, "use_double_wide_mlp") else 1,
    }


def global_heads(
    fields: Mapping[str, Any], windows: tuple[int | None, ...], heads: int, local: KVHeads
) -> KVHeads | None:
    """The KV heads of layers without a window: in fields, or in transformers' per_layer_config."""
    told = fields["per_layer_config"]
    if told is None and fields["global_head_dim"] is None:
        return None
    if told is None:
        has_own = flag(fields, "attention_k_eq_v") and fields["num_global_key_value_heads"]
        number = positive(fields, "num_global_key_value_heads") if has_own else local.number
        found = KVHeads(number, positive(fields, "global_head_dim", MAX_HEAD_DIM))
    else:
        each = [str(i) for i, window in enumerate(windows) if window is None]
        if not isinstance(told, dict) or any(told.get(i) != told.get(each[0]) for i in each):
            raise ValueError("per_layer_config must have equal heads for all full_attention layers")
        if others := {*told} - {*each}:
            raise ValueError(
                f"per_layer_config has layers {', '.join(sorted(others))}, but only layers with "
                "full_attention may have other heads"
            )
        own = {"num_key_value_heads": local.number, "head_dim": local.size, **told.get(each[0], {})}
        if unknown := {*own} - {"num_key_value_heads", "head_dim"}:
            raise ValueError(f"per_layer_config: {', '.join(sorted(unknown))} is not supported")
        size = positive(own, "head_dim", MAX_HEAD_DIM)
        found = KVHeads(positive(own, "num_key_value_heads"), size)
    if heads % found.number or found.size % 2:
        raise ValueError(
            f"{found.number} KV heads of size {found.size} in layers with full_attention do not "
            f"fit num_attention_heads = {heads}, or the size is odd"
        )
    return found


def streams(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields of DecoderConfig about residual streams and sparse gates."""
    if fields["altup_active_idx"] != 0:
        raise ValueError(
            f"altup_active_idx = {fields['altup_active_idx']!r} is not supported, only 0"
        )
    if not fields["hidden_size_per_layer_input"]:
        raise ValueError("hidden_size_per_layer_input = 0 is not supported with altup_num_inputs")
    sparse = fields["activation_sparsity_pattern"]
    if sparse is None:
        num_sparse = 10 if num_layers > 10 else 0
        sparse = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    if not isinstance(sparse, list) or len(sparse) != num_layers:
        raise ValueError(f"activation_sparsity_pattern is not a list of {num_layers} entries")
    if any(not isinstance(share, float | int) or not 0 <= share < 1 for share in sparse):
        raise ValueError("activation_sparsity_pattern must have numbers from 0 to below 1")
    num_streams = positive(fields, "altup_num_inputs", MAX_STREAMS)
    if num_streams == 1:
        raise ValueError("altup_num_inputs = 1 is not supported: it must be at least 2")
    return {
        "num_streams": num_streams,
        "laurel_rank": positive(fields, "laurel_rank"),
        "scales_streams": flag(fields, "altup_correct_scale"),
        "deviations": tuple(NormalDist().inv_cdf(x) if x > 0 else None for x in sparse),
    }


def per_layer_sizes(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    size = natural(fields, "hidden_size_per_layer_input")
    if size == 0:
        return {}
    vocab = positive(fields, "vocab_size_per_layer_input")
    if vocab < positive(fields, "vocab_size") and not family.has_streams:
        raise ValueError(
            f"vocab_size_per_layer_input = {vocab} must be at least vocab_size = "
            f"{fields['vocab_size']}, because each token has inputs of layers"
        )
    return {"per_layer_size": size, "per_layer_vocab": vocab}


def windows(
    fields: Mapping[str, Any], family: Family, rotates: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """The sliding window of each layer, in tokens; None is full attention."""
    window, kinds = fields[family.keys.window], fields["layer_types"]
    windowed = "chunked_attention" if family.has_chunks else "sliding_attention"
    if family.windowed in ("upper", "asked") and not flag(fields, "use_sliding_window"):
        window = None
    if kinds is None:
        names = {True: windowed, False: "full_attention"}
        has_any = window is not None or family.has_chunks
        kinds = [names[has_any and w] for w in windowed_layers(fields, family, rotates)]
    if not isinstance(kinds, list) or len(kinds) != len(rotates):
        raise ValueError(
            f"layer_types = {kinds!r} is not a list of {len(rotates)} entries, one per layer"
        )
    if family.ends_global:
        kinds = [*kinds[:-1], "full_attention"]
    for kind in kinds:
        if kind not in (windowed, "full_attention"):
            raise ValueError(
                f"layer type {kind!r} is not supported, only full_attention and {windowed}"
            )
    if windowed in kinds and not (is_int(window) and 1 <= window <= MAX_SIZE):
        raise ValueError(f"a layer has {windowed}, but {family.keys.window} = {window!r}")
    return tuple(window if kind == windowed else None for kind in kinds)


def windowed_layers(
    fields: Mapping[str, Any], family: Family, rotates: tuple[bool, ...]
) -> list[bool]:
    """Which layers have the sliding window, by the rule of the family."""
    if family.windowed == "upper":
        first = natural(fields, "max_window_layers")
        return [i >= first for i in range(len(rotates))]
    if family.windowed == "lower":
        behind = natural(fields, "max_window_layers")
        is_used = flag(fields, "use_sliding_window")
        return [is_used and i < behind and i % 2 == 0 for i in range(len(rotates))]
    if family.windowed == "unrotated":
        is_used = flag(fields, "use_sliding_window")
        return [is_used and not rotating for rotating in rotates]
    if family.windowed == "rotated":
        return list(rotates)
    if family.windowed == "pattern":
        every = positive(fields, "sliding_window_pattern") if fields["sliding_window"] else 1
        return [(i + 1) % every != 0 for i in range(len(rotates))]
    return [family.windowed in ("all", "asked")] * len(rotates)


def named_to_rotate(fields: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has rotary embedding, according to the config."""
    num_layers = positive(fields, "num_hidden_layers", MAX_LAYERS)
    layers = fields["no_rope_layers"]  # despite the name, 1 means rotary embedding
    if not layers and "no_rope_layer_interval" in fields:
        interval = positive(fields, "no_rope_layer_interval")
        layers = [(i + 1) % interval for i in range(num_layers)]
    if layers is None:
        return (True,) * num_layers
    if not isinstance(layers, list) or len(layers) < num_layers:
        raise ValueError(
            f"no_rope_layers = {layers!r} is not a list of {num_layers} entries, one per layer"
        )
    return tuple(bool(x) for x in layers[:num_layers])
