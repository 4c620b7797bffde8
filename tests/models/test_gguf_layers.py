"""GGUF files of models whose layers differ: Gemma 3n and 4, and models with recurrent layers."""

import math

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specserve import LLM, SamplingParams
from specserve.errors import ConfigError
from specserve.models.gguf.header import read_header
from specserve.models.loader import load_decoder, weight_bytes
from specserve.models.source import open_source
from specserve_kernels import reference
from tests.models.forward import logits, prompt
from tests.models.gguf_files import TIED, write
from tests.models.test_gguf import FLOAT, NEW, PROMPTS, greedy

GEMMA3N = {"vocab_size_per_layer_input": 320}  # converters fill the table up
DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
WIDE_DELTA = {"linear_num_value_heads": 6, "linear_num_key_heads": 2}
BAMBA = {"mamba_proj_bias": False}
MODELS = {  # family, what departs from its tiny checkpoint
    "gemma3n": ("gemma3n", TIED | GEMMA3N),
    "gemma4": ("gemma4", TIED),
    "gemma4, experts and keys as values": ("gemma4_moe", TIED),
    "gemma4, one width": ("gemma4", {"use_double_wide_mlp": False, "num_kv_shared_layers": 0}),
    "qwen3next": ("qwen3_next", DELTA),
    "qwen35": ("qwen3_5", DELTA),
    "qwen35, three value heads for a key head": ("qwen3_5", DELTA | WIDE_DELTA),
    "qwen35moe": ("qwen3_5_moe", DELTA),
    "granitehybrid": ("granite_hybrid", {"intermediate_size": 96}),
    "granitehybrid, experts": ("granite_hybrid_moe", {}),
    "bamba": ("bamba", BAMBA),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1, a norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
}


@pytest.mark.parametrize(("family", "overrides"), MODELS.values(), ids=MODELS)
def test_the_config_and_the_logits_are_those_of_the_checkpoint(tmp_path, family, overrides):
    file, plain = write(tmp_path, family, **overrides)
    open_source(file).check()
    got, want = open_source(file).config(), open_source(plain).config()
    if family != "falcon_h1":  # whose weights include the factors
        check_config(got, want)
    models = [load_decoder(path, "fp32", reference, rounding=FLOAT) for path in (file, plain)]
    torch.testing.assert_close(*(logits(m, prompt(320, 61)) for m in models), rtol=1e-3, atol=1e-3)
    estimate = weight_bytes(file, "fp32", reference)
    assert abs(estimate - models[0].weights.forms.num_bytes) < 0.1 * estimate


def check_config(got, want):
    """Files have the inputs of gated DeltaNets and of MLPs in maps of their own."""
    replace, same = msgspec.structs.replace, {"quantization": None, "architecture": ""}
    same |= {"family": want.family, "deviations": want.deviations}
    if want.num_streams > 1:
        for mine, its in zip(got.deviations, want.deviations, strict=True):
            assert mine == (its and pytest.approx(its, abs=1e-5))
    if want.mixture is not None:
        same["mixture"] = replace(got.mixture, style=want.mixture.style)
        assert same["mixture"] == want.mixture
    if hasattr(want.recurrent, "is_interleaved"):
        same["recurrent"] = replace(got.recurrent, is_interleaved=want.recurrent.is_interleaved)
        assert same["recurrent"] == want.recurrent
    assert replace(got, **same) == replace(want, **same)


def test_old_files_of_qwen3_next_have_all_inputs_in_one_map(tmp_path):
    """Of each key head after the other, as checkpoints have them."""

    def edit(writer):
        [tensors] = writer.tensors
        for i in (0, 2):
            qkv = tensors.pop(f"blk.{i}.attn_qkv.weight").tensor
            z = tensors.pop(f"blk.{i}.attn_gate.weight").tensor
            q, k, v = np.split(qkv, [64, 128])
            heads = [part.reshape(2, -1, part.shape[-1]) for part in (q, k, v, z)]
            joined = np.concatenate(heads, axis=1).reshape(-1, q.shape[-1])
            writer.add_tensor(f"blk.{i}.ssm_in.weight", joined)

    file, plain = write(tmp_path, "qwen3_next", "F32", edit=edit, **DELTA)
    open_source(file).check()
    models = [load_decoder(path, "fp32", reference, rounding=FLOAT) for path in (file, plain)]
    torch.testing.assert_close(*(logits(m, prompt(320, 29)) for m in models), rtol=1e-3, atol=1e-3)


def test_a_gate_of_one_row_may_be_a_matrix(tmp_path):
    """llama.cpp's converter writes it so, and did not do so earlier."""

    def edit(writer):
        for name, tensor in writer.tensors[0].items():
            if name.endswith("ffn_gate_inp_shexp.weight"):
                tensor.tensor = tensor.tensor[None]
                tensor.shape = tensor.tensor.shape

    file, plain = write(tmp_path, "qwen2_moe", edit=edit)
    assert read_header(file).tensors["blk.0.ffn_gate_inp_shexp.weight"].shape == (1, 64)
    open_source(file).check()
    models = [load_decoder(path, "fp32", reference, rounding=FLOAT) for path in (file, plain)]
    torch.testing.assert_close(*(logits(m, prompt(320, 29)) for m in models), rtol=1e-3, atol=1e-3)


def without(*keys):
    def edit(writer):
        for key in keys:
            del writer.kv_data[0][f"{writer.arch}.{key}"]

    return edit


def test_a_file_of_qwen_may_name_only_the_interval_of_attention(tmp_path):
    layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    edit = without("attention.recurrent_layers")
    file, plain = write(tmp_path, "qwen3_5", edit=edit, **DELTA | layers)
    got, want = (open_source(path).config() for path in (file, plain))
    assert got.recurrent_layers == want.recurrent_layers == (True, True, True, False)


def test_a_file_may_lack_the_width_of_an_mlp_that_no_layer_has(tmp_path):
    edit = without("feed_forward_length")
    file = write(tmp_path, "qwen3_5_moe", edit=edit, **DELTA).file
    open_source(file).check()
    assert load_decoder(file, "fp32", reference).config.mixture.width == 32


def test_files_may_have_keys_and_values_that_no_layer_uses(tmp_path):
    """As Gemma 3n's, whose last layers read the KV of earlier layers."""

    def edit(writer):
        for name in ("attn_k", "attn_v"):
            writer.add_tensor(f"blk.5.{name}.weight", np.zeros((32, 64), np.float32))
        writer.add_tensor("blk.5.attn_k_norm.weight", np.zeros(32, np.float32))

    file, plain = write(tmp_path, "gemma4", edit=edit)
    open_source(file).check()
    models = [load_decoder(path, "fp32", reference, rounding=FLOAT) for path in (file, plain)]
    torch.testing.assert_close(*(logits(m, prompt(320, 29)) for m in models), rtol=1e-3, atol=1e-3)


def test_a_file_of_gemma_3n_without_a_number_of_shared_layers_has_20_with_kv(tmp_path):
    layers = {
        "num_hidden_layers": 22,
        "layer_types": ["sliding_attention", "full_attention"] * 11,
        "activation_sparsity_pattern": [0.5] + [0.0] * 21,
    }
    edit = without("attention.shared_kv_layers")
    config = open_source(write(tmp_path, "gemma3n", edit=edit, **GEMMA3N | layers).file).config()
    assert config.num_shared_layers == 2


TEXTS = {  # family, type, what departs from its tiny checkpoint
    "gemma3n": ("gemma3n", "Q8_0", TIED | GEMMA3N),
    "gemma4": ("gemma4_moe", "Q4_0", TIED),
    "qwen35": ("qwen3_5", "Q4_0", DELTA),
    "falcon-h1": ("falcon_h1", "Q8_0", {}),
}


@pytest.mark.parametrize(("family", "type", "overrides"), TEXTS.values(), ids=TEXTS)
def test_greedy_tokens_are_those_of_transformers(tmp_path, family, type, overrides):
    file, plain = write(tmp_path, family, type, seed=1, **overrides)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    want = [greedy(model, ids) for ids in PROMPTS]
    settings = {"model.threads": 1, "memory.kv_bytes": 1 << 26, "model.dtype": "fp32"}
    settings["model.activations"] = "float"
    settings["scheduler.max_model_len"] = 256
    params = SamplingParams(temperature=0, max_tokens=NEW)
    for drafter in ("none", "ngram"):
        with LLM(file, None, drafter, set=settings, progress=False) as llm:
            assert [out.token_ids for out in llm.generate(PROMPTS, params)] == want


def put(key, value, add="add_uint32"):
    return lambda writer: getattr(writer, add)(f"{writer.arch}.{key}", value)


def factors(values):
    def edit(writer):
        del writer.tensors[0]["rope_freqs.weight"]
        if values is not None:
            writer.add_tensor("rope_freqs.weight", np.array(values, np.float32))

    return edit


def drop(*names):
    def edit(writer):
        for name in names:
            del writer.tensors[0][name]

    return edit


MISTAKES = {  # family, edit, the beginning of the reason
    "no laurel": ("gemma3n", drop("blk.0.laurel_l.weight"), "the tensor blk.0.laurel_l.weight is"),
    "no streams": ("gemma3n", drop("altup_proj.weight"), "the tensor altup_proj.weight is missing"),
    "too few shares": (
        "gemma3n",
        put("activation_sparsity_scale", [1.0], "add_array"),
        "activation_sparsity_scale has 1 entries, not 5",
    ),
    "no factors": ("gemma4", factors(None), "the tensor rope_freqs.weight is missing"),
    "other factors": ("gemma4", factors([1.0] * 8 + [2.0] * 8), "rope_freqs.weight = "),
    "a damaged factor": (
        "gemma4",
        factors([1.0] * 3 + [math.nan] + [1e30] * 12),
        "rope_freqs.weight = ",
    ),
    "a factor for each dimension": ("gemma4", factors([1.0] * 32), "rope_freqs.weight = "),
    "a scaled context": (
        "gemma4",
        put("rope.scaling.type", "yarn", "add_string"),
        "rope.scaling.type = 'yarn' is not supported",
    ),
    "other values": (
        "gemma4",
        put("attention.value_length", 16),
        "attention.value_length = 16 is not supported, only 32",
    ),
    "no size of windowed heads": (
        "gemma4",
        without("attention.key_length_swa"),
        "attention.key_length_swa is missing",
    ),
    "widths without order": (
        "gemma4",
        put("feed_forward_length", [128, 64] * 3, "add_array"),
        "feed_forward_length = ",
    ),
    "heads without order": (
        "gemma4",
        put("attention.head_count_kv", [2, 2, 1, 2, 2, 2], "add_array"),
        "attention.head_count_kv = ",
    ),
    "no value heads": (
        "qwen3_5",
        put("ssm.time_step_rank", 0),
        "ssm.inner_size = 96 is not a multiple of the 0 heads",
    ),
    "no list of KV heads": (
        "granite_hybrid",
        put("attention.head_count_kv", 2),
        "attention.head_count_kv must be a list",
    ),
}


@pytest.mark.parametrize(("family", "edit", "reason"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_of_a_file_is_named(tmp_path, family, edit, reason):
    own = GEMMA3N if family == "gemma3n" else {}
    file = write(tmp_path, family, edit=edit, **own).file
    with pytest.raises(ConfigError) as error:
        open_source(file).check()
    assert str(error.value).startswith(f"{file}: {reason}")


def test_blocks_must_not_span_heads(tmp_path):
    """Files of Qwen 3.5 have the columns of value heads in another order."""
    file = write(tmp_path, "qwen3_5", linear_key_head_dim=16, linear_value_head_dim=16).file
    with pytest.raises(ConfigError, match=r"heads of 16 columns are not multiples of 32"):
        load_decoder(file, "fp32", reference)
