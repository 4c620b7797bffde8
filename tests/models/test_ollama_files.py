"""GGUF files with Ollama's names are the same models as with llama.cpp's names."""

import logging

import numpy as np
import pytest
import torch
from gguf import GGUFValueType

from specserve.errors import ConfigError
from specserve.models.loader import load_decoder
from specserve.models.source import open_source
from specserve_kernels import reference
from tests.models.forward import logits, prompt
from tests.models.gguf_files import GEMMA3, TIED, put_tokenizer, write
from tests.models.test_gguf_layers import DELTA, FLOAT, put
from tests.models.test_gguf_tokenizer import as_gemma4, gemma4, model


def rename(keys=None, tensors=None, arch=None):
    """An edit of `write` that gives keys, parts of tensor names, and the architecture others."""

    def edit(writer):
        [metadata], [stored] = writer.kv_data, writer.tensors
        for old, new in (keys or {}).items():
            value = metadata.pop(f"{writer.arch}.{old}")
            if new is not None:
                metadata[f"{writer.arch}.{new}"] = value
        for old, new in (tensors or {}).items():
            for name in [*stored]:
                stored[name.replace(old, new)] = stored.pop(name)
        if arch is not None:
            metadata["general.architecture"].value = arch
            for key in [k for k in metadata if k.startswith(f"{writer.arch}.")]:
                metadata[key.replace(writer.arch, arch)] = metadata.pop(key)

    return edit


def with_vision(edit):
    def add(writer):
        edit(writer)
        for name in ("v.blk.0.attn_q.weight", "mm.0.weight"):
            writer.add_tensor(name, np.zeros((4, 4), np.float32))

    return add


ROPE = {"rope.freq_base": "rope.global.freq_base"}
EPS = {"attention.layer_norm_rms_epsilon": None}
NAMES = {".attn_output.": ".attn_out.", "attn_sinks.weight": "attn_sinks"}
NAMES |= {"post_attention_norm": "ffn_norm"}
YARN = {"attention.temperature_scale": "rope.scaling_beta"}
MODELS = {  # family, edit, what departs from its tiny checkpoint
    "gemma3": ("gemma3", with_vision(rename(ROPE | EPS)), GEMMA3),
    "gpt-oss": (
        "gpt_oss",
        rename({"expert_feed_forward_length": None}, NAMES, "gptoss"),
        {"swiglu_limit": 7.0},
    ),
    "lfm2": ("lfm2", rename(tensors={"token_embd_norm": "output_norm"}), {}),
    "mistral3": ("ministral3", rename(YARN), {}),
    "qwen35moe": ("qwen3_5_moe", with_vision(rename(tensors={"ssm_dt.bias": "ssm_dt"})), DELTA),
}


@pytest.mark.parametrize(("family", "edit", "overrides"), MODELS.values(), ids=MODELS)
def test_logits_are_those_of_the_checkpoint(tmp_path, caplog, family, edit, overrides):
    file, plain = write(tmp_path, family, edit=edit, **overrides)
    caplog.set_level(logging.WARNING, "specserve")
    open_source(file).check()
    words = "only the text model is loaded, without vision"
    assert (words in caplog.text) == (family in ("gemma3", "qwen3_5_moe"))
    models = [load_decoder(path, "fp32", reference, rounding=FLOAT) for path in (file, plain)]
    torch.testing.assert_close(*(logits(m, prompt(320, 29)) for m in models), rtol=1e-3, atol=1e-3)


def test_long_gemma_3_stretches_positions(tmp_path):
    """Ollama's files do not say so."""
    long = GEMMA3 | {"max_position_embeddings": 131_072}
    rope = open_source(write(tmp_path / "a", "gemma3", **long).file).config().rope_parameters
    assert rope.kind == "default"
    file = write(tmp_path / "b", "gemma3", edit=rename(ROPE), **long).file
    config = open_source(file).config()
    assert (config.rope_parameters.kind, config.rope_parameters.factor) == ("linear", 8.0)
    assert config.local_rope_parameters.kind == "default"


def test_gemma_4_has_its_tokenizer_under_another_name(tmp_path):
    files = model(tmp_path / "tokenizer", None, gemma4(), as_gemma4)

    def edit(writer):
        as_gemma4(writer)
        put_tokenizer(model=("llama", GGUFValueType.STRING))(writer)

    texts = {"tokenizer.json": files.plain / "tokenizer.json"}
    texts = {name: path.read_text() for name, path in texts.items()}
    texts["tokenizer_config.json"] = (files.plain / "tokenizer_config.json").read_text()
    sizes = {"vocab_size": 600, "vocab_size_per_layer_input": 600, "eos_token_id": 3}
    file = write(tmp_path, "gemma4", pre=None, files=texts, edit=edit, **TIED | sizes).file
    open_source(file).check()
    ours, theirs = (open_source(path).tokenizer() for path in (file, files.plain))
    assert ours.encode("a  b\n\n\nc<turn|>") == theirs.encode("a  b\n\n\nc<turn|>")


def test_value_heads_in_a_checkpoints_order_are_refused(tmp_path):
    edit = put("ssm.v_head_reordered", False, "add_bool")
    file = write(tmp_path, "qwen3_5", edit=edit, **DELTA).file
    with pytest.raises(ConfigError, match="v_head_reordered = False is not supported"):
        open_source(file).check()
