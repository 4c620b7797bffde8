"""What llama.cpp's converter writes for models whose layers differ: metadata and tensors."""

import re
from typing import NamedTuple

import numpy as np
import torch

from specserve.models.parse_config import load_config
from specserve.models.recurrent import GatedDelta, Mamba2
from specserve_bench.peers.gguf_file import add_delta

STACKS = re.compile(r"(model\.altup_(?:unembed_)?projections)\.\d+(\.weight)")
SUFFIXED = ("layer_scalar", "correct_output_scale")  # names that get .weight
ROUTER = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
STILL = 1e30  # of pairs that do not rotate


class Rows(NamedTuple):
    """Views of which one tensor of the file consists."""

    views: list

    def array(self, width):
        return torch.cat([view.reshape(-1, width) for view in self.views]).numpy()

    def put(self, values):
        sizes = [view.numel() // values.shape[-1] for view in self.views]
        for view, part in zip(self.views, values.split(sizes), strict=True):
            view.copy_(part.view(view.shape))


def add_layers(writer, config, plain):
    """The metadata of a model's layers, which may replace others."""
    told = load_config(plain)
    if config.model_type == "gemma3n_text":
        add_gemma3n(writer, config)
    elif config.model_type == "gemma4_text":
        add_gemma4(writer, config, told)
    elif config.model_type != "nemotron_h" and isinstance(told.recurrent, Mamba2):
        add_mamba(writer, config, told)
    elif isinstance(told.recurrent, GatedDelta):
        add_delta(writer, told, told.recurrent)


def add_gemma3n(writer, config):
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    scales = torch.special.ndtri(torch.tensor(config.activation_sparsity_pattern))
    writer.add_activation_sparsity_scale(scales.tolist())
    writer.add_feed_forward_length(config.intermediate_size)
    add_gemma(writer, config)


def add_gemma(writer, config):
    rope = config.rope_parameters
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([k == "sliding_attention" for k in config.layer_types])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def add_gemma4(writer, config, told):
    add_gemma(writer, config)
    layers, size = range(told.num_layers), told.global_heads.size
    for add, value in (("key", size), ("value", size)):
        getattr(writer, f"add_{add}_length")(value)
        getattr(writer, f"add_{add}_length_swa")(told.head_dim)
    writer.add_rope_dimension_count(size)
    writer.add_rope_dimension_count_swa(told.head_dim)
    writer.add_head_count_kv([told.kv_heads(i).number for i in layers])
    writer.add_feed_forward_length([told.inner_size(i) for i in layers])
    if told.mixture is not None:
        writer.add_expert_count(told.mixture.num_experts)
        writer.add_expert_used_count(told.mixture.num_active)
        writer.add_expert_feed_forward_length(told.mixture.width)
    turning = told.rope_parameters.turning_pairs(size)
    factors = np.array([1.0] * turning + [STILL] * (size // 2 - turning), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def add_mamba(writer, config, told):
    mamba = told.recurrent
    writer.add_ssm_conv_kernel(mamba.taps)
    writer.add_ssm_state_size(mamba.state_dim)
    writer.add_ssm_group_count(mamba.num_groups)
    writer.add_ssm_inner_size(mamba.width)
    writer.add_ssm_time_step_rank(mamba.num_heads)
    if config.model_type == "falcon_h1":
        return
    attends = map(told.attends, range(told.num_layers))
    writer.add_head_count_kv([told.num_kv_heads * has for has in attends])
    writer.add_rope_scaling_finetuned(told.rope[0])
    if told.mixture is not None:
        writer.add_expert_count(told.mixture.num_experts)
        writer.add_expert_used_count(told.mixture.num_active)
        writer.add_expert_shared_feed_forward_length(told.mixture.shared_width)


def named(name, tensor, config, found):
    """Add a tensor of these models to `found`, by the name that the converter gives it or by
    llama.cpp's; False: it has its usual name.
    """
    kind, layer = config.model_type, re.search(r"layers\.(\d+)\.(.*)", name)
    if (stack := STACKS.fullmatch(name)) is not None:
        found.setdefault(stack[1] + stack[2], []).append(tensor)
    elif name.endswith(SUFFIXED):
        found[f"{name}.weight"] = [tensor]
    elif kind == "gemma4_text" and layer is not None and layer[2] in ROUTER:
        found[f"blk.{layer[1]}.{ROUTER[layer[2]]}"] = [tensor]
    elif kind == "gemma4_text" and ".experts." in name:
        found[f"{name}.weight"] = [tensor]
    elif kind == "qwen3_5_moe_text" and name.endswith("experts.gate_up_proj"):
        for part, view in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            found[name.replace("gate_up_proj", f"{part}_proj.weight")] = [view]
    elif kind == "qwen3_5_moe_text" and name.endswith("experts.down_proj"):
        found[f"{name}.weight"] = [tensor]
    elif name.endswith("in_proj_qkvz.weight"):
        parts = parts_of_joined(tensor, config)
        found[f"blk.{layer[1]}.attn_qkv.weight"] = Rows(parts[:3])
        found[f"blk.{layer[1]}.attn_gate.weight"] = Rows(parts[3:])
    elif name.endswith("shared_mlp.input_linear.weight"):
        begin = "ffn_{}" if not config.num_local_experts else "ffn_{}_shexp"
        for part, view in zip(("gate", "up"), tensor.chunk(2), strict=True):
            found[f"blk.{layer[1]}.{begin.format(part)}.weight"] = [view]
    elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        found[f"blk.{layer[1]}.ffn_down.weight"] = [tensor]
    elif kind == "falcon_h1" and name.endswith("pre_ff_layernorm.weight"):
        found[f"blk.{layer[1]}.ffn_norm"] = [tensor]
    else:
        return False
    return True


def parts_of_joined(tensor, config):
    """Views of q, k, v and z, which Qwen3-Next has by key head."""
    k_heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    wide = config.linear_num_value_heads // k_heads * config.linear_value_head_dim
    each = tensor.view(k_heads, -1, tensor.shape[-1])
    return list(each.split([size, size, wide, wide], dim=1))


def changes(name, config, told):
    """What the converter does to an array before it writes it, and the opposite."""
    if config.model_type == "falcon_h1":
        factor = falcon_factor(name, config, told)
        return lambda x: x * factor, lambda x: x / factor
    is_tiled = config.model_type.startswith("qwen3_5")
    order = tiled_order(name, told.recurrent) if is_tiled else None
    if order is None:
        return lambda x: x, lambda x: x
    axis = 1 if name.endswith("out_proj.weight") else 0
    back = np.argsort(order)
    return lambda x: x.take(order, axis), lambda x: x.take(back, axis)


def falcon_factor(name, config, told):
    names = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if "in_proj" in name:
        mamba = told.recurrent
        group = mamba.num_groups * mamba.state_dim
        sizes = [mamba.width, mamba.width, group, group, mamba.num_heads]
        rows = np.repeat(config.ssm_multipliers, sizes) * config.ssm_in_multiplier
        return rows.astype(np.float32)[:, None]
    found = [factor for part, factor in names.items() if f"{part}.weight" in name]
    return np.float32(found[0] if found else 1.0)


def tiled_order(name, delta):
    """Value heads of the same key head are apart: head r of key head k is at r Hk + k."""
    group = delta.num_v_heads // delta.num_k_heads
    first = 2 * delta.num_k_heads * delta.k_dim
    begin, size = {
        "in_proj_qkv.weight": (first, delta.v_dim),
        "conv1d.weight": (first, delta.v_dim),
        "in_proj_z.weight": (0, delta.v_dim),
        "out_proj.weight": (0, delta.v_dim),
        "in_proj_a.weight": (0, 1),
        "in_proj_b.weight": (0, 1),
        "A_log": (0, 1),
        "dt_bias": (0, 1),
    }.get(name.partition("linear_attn.")[2], (0, 0))
    if not size:
        return None
    heads = np.arange(delta.num_v_heads * size).reshape(delta.num_k_heads, group, size)
    return np.concatenate([np.arange(begin), begin + heads.swapaxes(0, 1).flatten()])
