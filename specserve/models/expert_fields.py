"""Parses the fields of config.json about experts."""

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from specserve.models.config_fields import (
    either,
    flag,
    natural,
    number,
    optional_number,
    positive,
)
from specserve.models.experts import ExpertStyle, Mixture, number_field
from specserve.models.family import Family

MAX_EXPERTS = 1024  # limit of the kernels, in experts.cpp
ALPHA = 1.702  # slope of clamped gates in `Ops.experts`


def parse_mixture(fields: Mapping[str, Any], family: Family, num_layers: int) -> Mixture | None:
    """The layers' mixtures of experts; None if no layer has experts."""
    style = family.experts
    if style is None or (style.enabled is not None and not flag(fields, style.enabled)):
        return None
    name = number_field(fields, style.number_keys)
    number = fields.get(name, style.number)
    if number == 0:
        return None
    num_experts = positive({name: number}, name, MAX_EXPERTS)
    layers = layers_with_experts(fields, num_layers)
    if not any(layers):
        return None
    check_gate(fields, style)
    if fields.get("n_group", 1) != 1:
        raise ValueError(f"n_group = {fields['n_group']!r} is not supported, only 1")
    if style.weighs_input and fields[style.active_key] != 1:
        raise ValueError(
            f"{style.active_key} = {fields[style.active_key]!r} is not supported for this family, "
            "only 1"
        )
    if style.corrects is not None and not flag(fields, style.corrects):
        style = replace(style, correction=None)
    count = natural(fields, style.shared_count) if style.shared_count else 1
    factors = (style.factor, family.keys.residual_scale)
    return Mixture(
        num_experts=num_experts,
        num_active=positive(fields, style.active_key, num_experts),
        width=positive(fields, style.width),
        normalizes=either(style.normalizes, fields, "norm_topk_prob"),
        layers=layers,
        style=style,
        limit=optional_number(fields, style.limit),
        shared_width=count * positive(fields, style.shared_width) if style.shared_width else 0,
        factor=math.prod(optional_number(fields, key) or 1.0 for key in factors),
    )


def layers_with_experts(fields: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """By layer: whether it has experts. Families have different fields for this."""
    if (named := fields.get("moe_layers")) is not None:
        if not isinstance(named, list):
            raise ValueError(f"moe_layers = {named!r} is not a list of layers")
        return tuple(i in named for i in range(num_layers))
    every, without = 1, fields.get("mlp_only_layers") or []
    for name in ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"):
        every = positive(fields, name) if name in fields else every
    first, last = 0, num_layers - 1
    for name in ("moe_layer_start_index", "first_k_dense_replace"):
        first = natural(fields, name) if name in fields else first
    if fields.get("moe_layer_end_index", -1) != -1:  # -1: up to the last layer
        last = natural(fields, "moe_layer_end_index")
    if not isinstance(without, list):
        raise ValueError(f"mlp_only_layers = {without!r} is not a list of layers")
    return tuple(
        (i + 1) % every == 0 and first <= i <= last and i not in without for i in range(num_layers)
    )


def check_gate(fields: Mapping[str, Any], style: ExpertStyle) -> None:
    if not style.is_gated:
        if fields["mlp_hidden_act"] != "relu2":
            raise ValueError(
                f"mlp_hidden_act = {fields['mlp_hidden_act']!r} is not supported for experts, only "
                "'relu2'"
            )
        if fields.get("moe_latent_size") is not None:
            raise ValueError(
                f"moe_latent_size = {fields['moe_latent_size']!r} is not supported, only null"
            )
        if fields["mlp_bias"]:
            raise ValueError("mlp_bias = true is not supported for experts, only false")
        return
    if style.beside is None and fields["hidden_act"] != "silu":
        raise ValueError(
            f"hidden_act = {fields['hidden_act']!r} is not supported for experts, only 'silu'"
        )
    if style.limit is None:
        return
    if fields["swiglu_alpha"] != ALPHA:
        raise ValueError(
            f"swiglu_alpha = {fields['swiglu_alpha']!r} is not supported, only {ALPHA}"
        )
    number(fields, style.limit)
