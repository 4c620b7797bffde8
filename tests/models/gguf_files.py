"""Tiny models in GGUF, written with the `gguf` package as llama.cpp's converter writes them.

Beside each stands the same model as a checkpoint, with the values that its blocks mean.
"""

import json
import math
import re
from typing import NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, SpecialVocab, TokenType
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig

from specserve.models.parse_config import load_config
from specserve.models.recurrent import Mamba2
from tests.checkpoints import tiny_checkpoint
from tests.models import gguf_layers

WEIGHTS = "model.safetensors"
ARCHITECTURES = {  # model_type -> llama.cpp's architecture
    "arcee": "arcee",
    "apertus": "apertus",
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "granitemoehybrid": "granitehybrid",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
    "cohere": "command-r",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "granitemoe": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "nemotron": "nemotron",
    "olmo3": "olmo2",
    "seed_oss": "seed_oss",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "cohere2": "cohere2",
    "exaone4": "exaone4",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "llama": "llama",
    "nemotron_h": "nemotron_h",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
}
TURNED = (
    "llama",
    "mistral",
    "mixtral",
    "smollm3",
    "granite",
    "granitemoe",
    "arcee",
    "bamba",
    "granitemoehybrid",
    "ministral3",
)  # whose rows of q and k are turned
SHIFTED = "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"  # norms have a 1
SCALES = {  # type -> where a block has scales: byte -> one that makes small weights of random bytes
    "IQ1_M": {48: 1e-3},  # in the upper bits of four words
    "IQ1_S": {0: 2e-3},
    "IQ2_S": {0: 2e-4},
    "IQ2_XS": {0: 2e-4},
    "IQ2_XXS": {0: 2e-4},
    "IQ3_S": {0: 1e-4},
    "IQ3_XXS": {0: 1e-4},
    "IQ4_NL": {0: 3e-4},
    "IQ4_XS": {0: 1e-5},
    "Q2_K": {80: 1e-3, 82: 2e-3},
    "Q3_K": {108: 3e-4},
    "Q4_K": {0: 3e-4, 2: 2e-3},
    "Q5_K": {0: 1.5e-4, 2: 2e-3},
    "Q6_K": {208: 1e-4},
    "Q8_K": {0: 3e-4},  # a float32
}
WRITTEN = {  # types that the `gguf` package can quantize to
    "Q4_0": {0: 0},
    "Q4_1": {0: 0, 2: 0},
    "Q5_0": {0: 0},
    "Q5_1": {0: 0, 2: 0},
    "Q8_0": {0: 0},
    "MXFP4": {},
    "TQ1_0": {52: 0},
    "TQ2_0": {64: 0},
}
TYPES = "F32", "F16", "BF16", *WRITTEN, *SCALES
WIDE = {"hidden_size": 256, "intermediate_size": 256}  # of which every type has whole blocks


TIED = {"tie_word_embeddings": True}
# The scale of queries and the windows that files of Gemma 3 have without saying so.
GEMMA3 = TIED | {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 16}


class Pair(NamedTuple):
    file: object
    plain: object  # the folder of a checkpoint that means the same


def write(
    folder,
    family="qwen3",
    type="Q8_0",
    *,
    pre="gpt-2",
    files=None,
    edit=None,
    parts=0,
    arch=None,
    **overrides,
):
    """A model of which every linear map has the type, and the embedding, too.

    `type` may be a function of llama.cpp's name; `files` are texts of the checkpoint's other files;
    `edit` changes the writer before it writes; `parts` is the number of tensors in a part; `arch`
    replaces the architecture.
    """
    plain = tiny_checkpoint(folder / "plain", family, **overrides)
    add_generation_config(plain)
    for name, text in (files or {}).items():
        (plain / name).write_text(text, encoding="utf-8")
    config = AutoConfig.from_pretrained(plain)
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4
    file = folder / "model.gguf"
    writer = GGUFWriter(file, arch or ARCHITECTURES[config.model_type], split_max_tensors=parts)
    add_shape(writer, config, load_config(plain).intermediate_size, plain)
    add_tokenizer(writer, plain, pre)
    add_tensors(writer, plain, config, type)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(folder.glob("*.gguf"))
    return Pair(files[0], plain)


def put_tokenizer(**values):
    """An edit of `write` that replaces what the metadata say of the tokenizer; None takes it out.

    A value is one with its type, as the writer's add_key_value takes them.
    """

    def edit(writer):
        for key, value in values.items():
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}", None)
            if value is not None:
                writer.add_key_value(f"tokenizer.ggml.{key}", *value)

    return edit


def add_generation_config(folder):
    config = json.loads((folder / "config.json").read_text())
    written = {"eos_token_id": config["eos_token_id"], "temperature": 0.5, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(written | {"top_p": 0.75}))


def add_shape(writer, config, width, plain):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if config.model_type != "nemotron_h":
        writer.add_feed_forward_length(width)
    writer.add_head_count(config.num_attention_heads)
    kv_heads = config.num_key_value_heads
    if config.model_type in ("lfm2", "lfm2_moe"):
        kv_heads = [kv_heads * (kind == "full_attention") for kind in config.layer_types]
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "nemotron_h":
        kv_heads = add_mamba(writer, config, width)
    writer.add_head_count_kv(kv_heads)
    centered = {"cohere2": "layer_norm_eps", "cohere": "layer_norm_eps"}
    centered |= {"starcoder2": "norm_epsilon", "stablelm": "layer_norm_eps", "nemotron": "norm_eps"}
    if config.model_type in centered:
        writer.add_layer_norm_eps(getattr(config, centered[config.model_type]))
    else:
        eps = config.norm_eps if config.model_type.startswith("lfm2") else None
        eps = eps or getattr(config, "layer_norm_epsilon", None) or config.rms_norm_eps
        writer.add_layer_norm_rms_eps(eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None)
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4, "rope_type": "default"}
    rope = rope.get("full_attention", rope)
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    add_rope(writer, config, rope)
    if config.model_type in ("glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for add, field in FIELDS.get(config.model_type, {}).items():
        if (value := getattr(config, field)) is not None:
            getattr(writer, add)(value)
    if config.model_type == "lfm2_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    gguf_layers.add_layers(writer, config, plain)
    writer.add_sampling_temp(0.5)
    writer.add_sampling_top_k(20)
    writer.add_sampling_top_p(0.75)


def add_mamba(writer, config, width):
    """Return the numbers of KV heads by layer."""
    kinds = config.layers_block_type
    writer.add_feed_forward_length([width * (kind == "mlp") for kind in kinds])
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    return [config.num_key_value_heads * (kind == "full_attention") for kind in kinds]


MIXTURE = {"add_expert_used_count": "num_experts_per_tok"}
QWEN = MIXTURE | {
    "add_expert_count": "num_experts",
    "add_expert_feed_forward_length": "moe_intermediate_size",
}
SHARED = {"add_expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
SOFT_CAPS = {
    "add_attn_logit_softcapping": "attn_logit_softcapping",
    "add_final_logit_softcapping": "final_logit_softcapping",
}
GRANITE = {
    "add_attention_scale": "attention_multiplier",
    "add_embedding_scale": "embedding_multiplier",
    "add_logit_scale": "logits_scaling",
    "add_residual_scale": "residual_multiplier",
}
WINDOW = {"add_sliding_window": "sliding_window"}
FIELDS = {  # model_type -> further metadata: the writer's method -> field of the config
    "cohere": {"add_logit_scale": "logit_scale"},
    "olmo3": WINDOW,
    "starcoder2": WINDOW,
    "cohere2": WINDOW | {"add_logit_scale": "logit_scale"},
    "ernie4_5_moe": {
        "add_expert_count": "moe_num_experts",
        "add_expert_feed_forward_length": "moe_intermediate_size",
        "add_expert_shared_count": "moe_num_shared_experts",
        "add_expert_used_count": "moe_k",
        "add_interleave_moe_layer_step": "moe_layer_interval",
        "add_leading_dense_block_count": "moe_layer_start_index",
    },
    "exaone4": WINDOW,
    "glm4_moe": MIXTURE
    | {
        "add_expert_count": "n_routed_experts",
        "add_expert_feed_forward_length": "moe_intermediate_size",
        "add_expert_shared_count": "n_shared_experts",
        "add_expert_weights_norm": "norm_topk_prob",
        "add_expert_weights_scale": "routed_scaling_factor",
        "add_leading_dense_block_count": "first_k_dense_replace",
    },
    "llama4_text": MIXTURE
    | {
        "add_expert_count": "num_local_experts",
        "add_expert_feed_forward_length": "intermediate_size",
        "add_interleave_moe_layer_step": "interleave_moe_layer_step",
    },
    "minimax_m2": MIXTURE
    | {
        "add_expert_count": "num_local_experts",
        "add_expert_feed_forward_length": "intermediate_size",
    },
    "gemma2": WINDOW | SOFT_CAPS,
    "gemma3_text": WINDOW | SOFT_CAPS,
    "gpt_oss": WINDOW
    | MIXTURE
    | {
        "add_expert_count": "num_local_experts",
        "add_expert_feed_forward_length": "intermediate_size",
    },
    "granite": GRANITE,
    "granitemoehybrid": GRANITE,
    "qwen3_5_moe_text": QWEN | SHARED,
    "qwen3_next": QWEN | SHARED,
    "granitemoe": GRANITE | MIXTURE | {"add_expert_count": "num_local_experts"},
    "lfm2_moe": QWEN | {"add_leading_dense_block_count": "num_dense_layers"},
    "mistral": WINDOW,
    "mixtral": WINDOW | MIXTURE | {"add_expert_count": "num_local_experts"},
    "olmoe": MIXTURE | {"add_expert_count": "num_experts"},
    "phi3": WINDOW,
    "qwen2_moe": QWEN | SHARED,
    "qwen3_moe": QWEN,
}


def add_rope(writer, config, rope):
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "llama_4_scaling_beta" in rope:
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config, rope))
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        stretched = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(stretched) / math.log(original))
        )
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)


def llama3_factors(config, rope):
    """By which llama3 divides each frequency."""
    low, high, factor = (rope[f"{name}factor"] for name in ("low_freq_", "high_freq_", ""))
    original, factors = rope["original_max_position_embeddings"], []
    for i in range(0, config.head_dim, 2):
        turns = original / (2 * math.pi * rope["rope_theta"] ** (i / config.head_dim))
        smooth = min(1, max(0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def add_tokenizer(writer, folder, pre):
    """`pre` None: SentencePiece's, of which tokenizer.json has a score for each token."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    written = json.loads((folder / "tokenizer.json").read_text())
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    texts = {id: text for text, id in tokenizer.get_vocab().items()}
    added = tokenizer.get_added_tokens_decoder()
    tokens, types = [], []
    for id in range(max(size, len(texts))):
        tokens.append(texts.get(id, f"[PAD{id}]"))
        types.append(token_type(tokens[-1], added.get(id), id in texts, pre))
    writer.add_tokenizer_model("gpt2" if pre else "llama")
    writer.add_tokenizer_pre(pre or "default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if not pre:
        ranks = {
            "".join(merge): i for i, merge in reversed([*enumerate(written["model"]["merges"])])
        }
        writer.add_token_scores([-float(ranks.get(token, 1e6)) for token in tokens])
    SpecialVocab(folder, load_merges=bool(pre)).add_to_gguf(writer, quiet=True)


def token_type(text, added, is_known, pre):
    if not is_known:
        return TokenType.UNUSED
    if added is not None:
        is_unknown = text == "<unk>" and not pre
        kind = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
        return TokenType.UNKNOWN if is_unknown else kind
    return TokenType.BYTE if text.startswith("<0x") and not pre else TokenType.NORMAL


def add_tensors(writer, plain, config, type):
    architecture = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[writer.arch]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = load_file(plain / WEIGHTS)
    meant = {name: tensor.clone() for name, tensor in tensors.items()}
    add_alphas(writer, tensors)
    told = load_config(plain)
    for name, views in stacks(meant, config).items():
        if isinstance(views, gguf_layers.Rows):
            array = views.array(config.hidden_size)
        else:
            array = torch.stack(views).numpy() if len(views) > 1 else views[0].numpy().copy()
        is_norm = name.endswith("norm.weight") and "linear_attn" not in name
        shift = 1 if is_norm and writer.arch in SHIFTED else 0
        named = name + ".bias" if name.endswith("expert_bias") else name
        named = named.replace(".dt_bias", ".dt_proj.bias")
        if ".feed_forward.experts.w" in named:  # the converter's name for the stacks of LFM2
            named = named.removeprefix("model.")
        theirs = name if name.startswith("blk.") else names.get_name(named, (".weight", ".bias"))
        there, back = gguf_layers.changes(name, config, told)
        theirs += ".weight" if theirs.endswith("sinks") else ""
        kind = kind_of(array, theirs, type(theirs) if callable(type) else type)
        stored = quantized(there(array + shift).reshape(-1, array.shape[-1]), kind)
        means = dequantized(stored, kind).reshape(array.shape)
        values = torch.from_numpy(np.ascontiguousarray(back(means) - shift))
        if isinstance(views, gguf_layers.Rows):
            views.put(values)
        else:
            for view, value in zip(views, values if len(views) > 1 else [values], strict=True):
                view.copy_(value)
        stored = stored.reshape(*array.shape[:-1], -1)
        if config.model_type in TURNED and theirs.split(".")[-2] in ("attn_q", "attn_k"):
            heads = len(stored) // config.head_dim
            halves = stored.reshape(heads, 2, -1, *stored.shape[1:])
            stored = halves.swapaxes(1, 2).reshape(stored.shape)
        if theirs.endswith(("ffn_gate_inp_shexp.weight", "exp_probs_b.bias")):
            stored = stored.reshape(-1)
        if theirs.endswith(("shortconv.conv.weight", "ssm_conv1d.weight")):
            stored = stored[:, 0]
        if theirs.endswith(".ssm_a"):
            stored = -np.exp(stored)
        is_mamba = isinstance(told.recurrent, Mamba2)
        if is_mamba and theirs.endswith((".ssm_a", ".ssm_d")):
            stored = stored.reshape(-1, 1)
        if is_mamba and theirs.endswith("ssm_norm.weight"):
            stored = stored.reshape(told.recurrent.num_groups, -1)
        writer.add_tensor(theirs, stored, raw_dtype=kind)
    save_file(meant, plain / WEIGHTS, metadata={"format": "pt"})


EXPERT = re.compile(r"(.*\.experts\.)\d+\.(.*)")
INTERLEAVED = re.compile(r"(.*\.experts\.)(gate_up|down)_proj(|_bias)")


def add_alphas(writer, tensors):
    """The parameters of xIELU, which are metadata."""
    count = sum(name.endswith(".act_fn.alpha_p") for name in tensors)
    if not count:
        return
    names = [f"model.layers.{i}.mlp.act_fn" for i in range(count)]
    writer.add_xielu_alpha_p([tensors[f"{name}.alpha_p"].item() for name in names])
    writer.add_xielu_alpha_n([tensors[f"{name}.alpha_n"].item() for name in names])
    writer.add_xielu_beta([0.5] * count)
    writer.add_xielu_eps([-1e-6] * count)


def stacks(tensors, config):
    """Views of the tensors, by the names that llama.cpp's converter gives them: experts become
    stacks, and gates that are in one tensor with ups are parted.
    """
    found = {}
    for name, tensor in tensors.items():
        if gguf_layers.named(name, tensor, config, found):
            continue
        if (one := EXPERT.fullmatch(name)) is not None:
            found.setdefault(one[1] + one[2], []).append(tensor)
        elif (all := INTERLEAVED.fullmatch(name)) is not None:
            kind = ".bias" if all[3] else ".weight"
            wide = tensor if all[3] else tensor.transpose(1, 2)
            parts = {"down": wide}
            if all[2] == "gate_up":
                parts = {"gate": wide[:, 0::2], "up": wide[:, 1::2]}
                if config.model_type == "llama4_text":
                    parts = dict(zip(parts, wide.chunk(2, dim=1), strict=True))
            found |= {f"{all[1]}{part}_proj{kind}": [views] for part, views in parts.items()}
        elif ".act_fn." in name:
            continue
        elif name.endswith("e_score_correction_bias"):
            found[name.removesuffix("_bias") + ".bias"] = [tensor]
        elif name.endswith(".input_linear.weight"):
            gate, up = tensor.chunk(2, dim=1)
            experts = name.replace("block_sparse_moe.input_linear", "mlp.experts.{}_proj")
            found |= {experts.format("gate"): [gate], experts.format("up"): [up]}
        else:
            found[name] = [tensor]
    return found


def kind_of(values, name, type):
    """Rows that the type's blocks do not divide get another, as llama.cpp gives them."""
    plain = ("ffn_gate_inp", "shortconv.conv", "ssm_conv1d")
    is_map = values.ndim > 1 and name.endswith(".weight") and not any(p in name for p in plain)
    kind = GGMLQuantizationType[type if is_map else "F32"]
    others = GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16
    return next(k for k in (kind, *others) if values.shape[-1] % gguf.GGML_QUANT_SIZES[k][0] == 0)


def quantized(values, kind):
    """Blocks of the values; for types that the package cannot write, random blocks."""
    if kind.name not in SCALES:
        return gguf.quants.quantize(values, kind)
    width, _ = gguf.GGML_QUANT_SIZES[kind]
    dice = np.random.default_rng(values.size)
    blocks = random_blocks(kind.name, (len(values), values.shape[1] // width), dice)
    for place, scale in SCALES[kind.name].items():
        put_scales(kind.name, blocks, place, np.full((*blocks.shape[:2], 1), scale))
    return blocks.reshape(len(values), -1)


def random_blocks(name, shape, dice):
    _, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = dice.integers(256, size=(*shape, size), dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = dice.integers(118, 124, size=shape)  # exponents of 2
    return blocks


def put_scales(name, blocks, place, scales):
    """Write scales [N, blocks, 1] at a byte of every block."""
    octets = scales.astype(np.float32 if name == "Q8_K" else np.float16).view(np.uint8)
    if name != "IQ1_M":
        blocks[..., place : place + octets.shape[-1]] = octets
        return
    for i in range(4):
        word = blocks[..., place + 2 * i + 1]
        word[:] = word & 15 | (octets[..., i // 2] >> 4 * (i % 2) & 15) << 4


def dequantized(stored, kind):
    if kind.name != "Q8_K":
        return gguf.quants.dequantize(stored, kind)
    blocks = stored.reshape(len(stored), -1, 292)
    scales, codes = blocks[..., :4].copy().view(np.float32), blocks[..., 4:260].view(np.int8)
    return (scales * codes.astype(np.float32)).reshape(len(stored), -1)
