"""What is wrong with a GGUF file is told in a line, before torch is imported."""

import gc
import re
import struct
import sys
from pathlib import Path
from subprocess import run

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFValueType, GGUFWriter, TokenType

from specserve.api.input_processor import load_text_files
from specserve.errors import ConfigError
from specserve.models.loader import load_decoder
from specserve.models.source import open_source
from specserve_kernels import reference
from tests.models.gguf_files import put_tokenizer, write
from tests.models.refusals import refusals


@pytest.fixture(scope="module")
def refusal(tmp_path_factory):
    with refusals(tmp_path_factory.mktemp("said")) as run:
        yield run


def put(**values):
    """Write keys of the architecture with other values; None leaves the key out."""

    def edit(writer):
        for key, value in values.items():
            name = f"{writer.arch}.{key.replace('__', '.')}"
            writer.kv_data[0].pop(name, None)
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            elif isinstance(value, list):
                writer.add_array(name, value)
            elif value is not None:
                writer.add_string(name, value)

    return edit


def other_architecture(writer):
    writer.kv_data[0].pop("general.architecture")
    writer.add_string("general.architecture", "mamba")


def add_factors(dtype=np.float32, size=8, value=2):
    return lambda writer: writer.add_tensor("rope_freqs.weight", np.full(size, value, dtype))


def without(name):
    return lambda writer: writer.tensors[0].pop(name)


def twice(writer):
    tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
    tokens[7] = tokens[8]


def of_type(number):
    return lambda data: after_name(data, "output_norm.weight", 4 + 8, struct.pack("<I", number))


def after_name(data, name, skipped, written):
    """Replace bytes of a tensor's entry, counted from the end of its name."""
    place = data.index(name.encode()) + len(name) + skipped
    return data[:place] + written + data[place + len(written) :]


def at(place, written):
    return lambda data: data[:place] + written + data[place + len(written) :]


EDITS = {  # what is wrong when it is written -> words of the complaint
    "another architecture": (
        other_architecture,
        "GGUF files of architecture 'mamba' are not supported",
    ),
    "experts that are not there": (
        put(expert_count=8, expert_used_count=2),
        "the tensor blk.0.ffn_gate_inp.weight is missing",
    ),
    "more active experts than experts": (
        put(expert_count=8, expert_used_count=9),
        "num_experts_per_tok = 9 must be a whole number from 1 to 8",
    ),
    "experts of a sigmoid": (
        put(expert_gating_func=2),
        "llama.expert_gating_func = 2 is not supported",
    ),
    "as many MTP layers as layers": (
        put(nextn_predict_layers=2),
        "nextn_predict_layers = 2 must be less than block_count = 2",
    ),
    "no layers": (put(block_count=None), "the key llama.block_count is missing"),
    "a number in words": (put(block_count="2"), "num_hidden_layers = '2' must be a whole number"),
    "a number a layer": (put(attention__head_count=[4, 4]), "= an array of 2 must be"),
    "billions of layers": (put(block_count=2**32 - 1), "num_hidden_layers = 4294967295 must be"),
    "values of another size": (put(attention__value_length=8), "value_length = 8 is not supported"),
    "a partial rotation": (put(rope__dimension_count=8), "dimension_count = 8 is not supported"),
    "another scaling": (
        put(rope__scaling__type="longrope", rope__scaling__factor=2.0),
        "rope type 'longrope' is not supported",
    ),
    "yarn of another kind": (
        put(rope__scaling__type="yarn", rope__scaling__yarn_ext_factor=0.5),
        "llama.rope.scaling.yarn_ext_factor = 0.5 is not supported",
    ),
    "scaling beside its factors": (
        lambda writer: (put(rope__scaling__type="linear")(writer), add_factors()(writer)),
        "rope_freqs.weight with rope.scaling.type = 'linear'",
    ),
    "factors in halves": (add_factors(np.float16), "rope_freqs.weight is not a list of F32"),
    "too many factors": (add_factors(size=1024), "rope_freqs.weight is not a list of F32"),
    "factors of nothing": (add_factors(value=0), "factors = 0.0 must be"),
    "factors for other heads": (add_factors(size=4), "rope_freqs.weight has 4 entries, not 8"),
    "billions of windows": (
        put(attention__sliding_window=7, block_count=2**32 - 1),
        "num_hidden_layers = 4294967295 must be",
    ),
    "an alignment that is none": (
        lambda writer: writer.add_uint32("general.alignment", 24),
        "general.alignment = 24 must be a power of two",
    ),
    "a scale of attention": (put(attention__scale=0.5), "llama.attention.scale = 0.5"),
    "a layer less": (put(block_count=1), "the tensor 'blk.1.attn_norm.weight' is not part of"),
    "a layer more": (put(block_count=3), "the tensor blk.2."),
    "a tensor less": (without("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight is missing"),
    "no embedding": (without("token_embd.weight"), "the tensor token_embd.weight is missing"),
    "other widths": (
        put(feed_forward_length=96),
        "has the shape [128, 64], but the metadata require",
    ),
    "no tokenizer": (put_tokenizer(model=None), "tokenizer.ggml.model = None is not supported"),
    "an unknown split": (
        put_tokenizer(pre=("unheard-of", 8)),
        "tokenizer.ggml.pre = 'unheard-of' is not supported, only a.x-4.0",
    ),
}
TOKENIZERS = {  # as EDITS, of what is seen when the tokenizer is loaded
    "no tokens": (put_tokenizer(tokens=None), "tokenizer.ggml.tokens is missing"),
    "no merges": (put_tokenizer(merges=None), "tokenizer.ggml.merges is missing"),
    "a merge of no token": (put_tokenizer(merges=(["a zz"], 9)), "tokenizer cannot be built"),
    "a token twice": (twice, "tokenizer.ggml.tokens has a token twice"),
    "an end that is no token": (put_tokenizer(eos_token_id=(9999, 4)), "eos_token_id = 9999"),
    "another end that is no token": (
        put_tokenizer(eot_token_id=(9999, 4)),
        "eot_token_id = 9999 is not a token: there are 320",
    ),
    "fewer types than tokens": (
        put_tokenizer(token_type=([TokenType.NORMAL] * 3, 9)),
        "tokenizer.ggml.token_type has 3 entries, not 320",
    ),
}
APERTUS = {  # as EDITS, of the activation
    "no number for a layer": ({"alpha_p": [0.5]}, "xielu.alpha_p must have a number for each of 2"),
    "a word for a number": ({"alpha_n": ["a", "b"]}, "xielu.alpha_n must have a number for each"),
    "another slope": ({"beta": [0.5, 0.25]}, "xielu.beta must be 0.5"),
}
DAMAGE = {  # what is wrong with the bytes -> words of the complaint
    "nothing": (lambda data: b"", "the file is empty"),
    "another file": (lambda data: b"PK\x03\x04" + data[4:], "does not begin with GGUF"),
    "four bytes": (lambda data: data[:4], "ends too early"),
    "half a header": (lambda data: data[:2000], "ends too early"),
    "half of the weights": (lambda data: data[: -len(data) // 3], "bytes beyond the file"),
    "a byte less": (lambda data: data[:-40], "bytes beyond the file"),
    "the first version": (at(4, struct.pack("<I", 1)), "version 1 of GGUF is not supported"),
    "a big-endian number": (at(4, struct.pack(">I", 3)), "a big-endian GGUF file"),
    "2^60 tensors": (at(8, struct.pack("<Q", 1 << 60)), "1152921504606846976 tensors"),
    "2^60 keys": (at(16, struct.pack("<Q", 1 << 60)), "1152921504606846976 keys"),
    "a long key": (at(24, struct.pack("<Q", 1 << 40)), "1099511627776 bytes of text"),
    "a type to come": (of_type(999), "has the type number 999. Use another quantization"),
    "a type of other floats": (of_type(40), "has the type NVFP4. Use another quantization"),
    "a quantized norm": (of_type(8), "only linear maps may be quantized"),
    "no dimensions": (
        lambda data: after_name(data, "output_norm.weight", 0, struct.pack("<I", 0)),
        "'output_norm.weight' has 0 dimensions",
    ),
    "a norm that is too long": (
        lambda data: after_name(data, "output_norm.weight", 4, struct.pack("<Q", 1 << 39)),
        "bytes beyond the file",
    ),
    "a row that no blocks make": (
        lambda data: after_name(data, "blk.0.attn_q.weight", 4, struct.pack("<Q", 63)),
        "'blk.0.attn_q.weight': rows of 63 values do not fit Q8_0 blocks",
    ),
    "a tensor of nothing": (
        lambda data: after_name(data, "output_norm.weight", 4, struct.pack("<Q", 0)),
        "'output_norm.weight' has the shape [0]",
    ),
    "a key twice": (
        lambda data: data.replace(b"general.sampling.top_k", b"general.sampling.top_p"),
        "the key 'general.sampling.top_p' occurs twice",
    ),
    "a tensor twice": (
        lambda data: data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"),
        "two tensors have the same name",
    ),
    "a tensor over another": (
        lambda data: after_name(data, "output_norm.weight", 4 + 8 + 4, struct.pack("<Q", 0)),
        "overlaps another tensor",
    ),
    "a tensor between places": (
        lambda data: after_name(data, "output_norm.weight", 4 + 8 + 4, struct.pack("<Q", 1)),
        "is not aligned to 32 bytes",
    ),
    "a tensor beyond the end": (
        lambda data: after_name(data, "output_norm.weight", 4 + 8 + 4, struct.pack("<Q", 1 << 50)),
        "bytes beyond the file",
    ),
}


@pytest.mark.parametrize(("edit", "complaint"), EDITS.values(), ids=EDITS)
def test_what_a_file_says_wrong_is_reported(refusal, tmp_path, edit, complaint):
    write(tmp_path, "llama", edit=edit)
    told = refusal(tmp_path, "serve", "model.gguf")
    assert told.startswith("error: model.gguf") and complaint in told


@pytest.mark.parametrize(("values", "complaint"), APERTUS.values(), ids=APERTUS)
def test_what_is_wrong_with_an_activation_is_reported(tmp_path, values, complaint):
    def edit(writer):
        for key, value in values.items():
            writer.kv_data[0].pop(f"xielu.{key}")
            writer.add_array(f"xielu.{key}", value)

    with pytest.raises(ConfigError, match=complaint):
        open_source(write(tmp_path, "apertus", edit=edit).file).check()


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    return write(tmp_path_factory.mktemp("model"), "llama").file.read_bytes()


@pytest.mark.parametrize(("damage", "complaint"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_reported(refusal, tmp_path, content, damage, complaint):
    (tmp_path / "model.gguf").write_bytes(damage(content))
    told = refusal(tmp_path, "serve", "model.gguf")
    assert told.startswith("error: model.gguf") and complaint in told


@pytest.mark.parametrize(("edit", "complaint"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_what_is_wrong_with_a_tokenizer_is_reported(tmp_path, edit, complaint):
    file, _ = write(tmp_path, "llama", edit=edit)
    with pytest.raises(ConfigError, match=f"model.gguf: .*{re.escape(complaint)}"):
        load_text_files(file)


def not_a_number(writer):
    writer.tensors[0]["blk.1.attn_norm.weight"].tensor[0] = np.nan


@pytest.mark.parametrize("wrong", ["header", "metadata", "tensors", "tokenizer", "weights"])
def test_a_refused_file_is_not_mapped(tmp_path, wrong):
    edits = {"metadata": put(expert_gating_func=2), "tensors": without("blk.1.ffn_up.weight")}
    edits |= {"tokenizer": put_tokenizer(tokens=None), "weights": not_a_number}
    file = write(tmp_path, "llama", edit=edits.get(wrong)).file
    if wrong == "header":
        file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ConfigError):
        source = open_source(file)
        source.check()
        source.tokenizer()
        load_decoder(file, "fp32", reference)
    del source
    gc.collect()
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_billions_of_mtp_layers_take_no_memory(tmp_path):
    edit = put(nextn_predict_layers=2**32 - 3, block_count=2**32 - 1)
    source = open_source(write(tmp_path, "llama", edit=edit).file)
    source.check()
    assert (source.config().num_layers, source.mtp_tensors()) == (2, set())


def test_unknown_keys_change_nothing(tmp_path):
    def edit(writer):
        put(quantizer__date="2026-11-27", some__array=[1, 2])(writer)
        writer.add_string("quantize.imatrix.file", "imatrix.dat")

    odd, plain = (write(tmp_path / str(e), "llama", edit=e).file for e in (edit, None))
    open_source(odd).check()
    assert open_source(odd).config() == open_source(plain).config()


def test_a_chat_begins_once(tmp_path):
    """Although the template and the tokenizer's flag both add a token at the beginning."""

    def edit(writer):
        writer.kv_data[0].pop("tokenizer.chat_template")
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
        put_tokenizer(
            add_bos_token=(True, GGUFValueType.BOOL), bos_token_id=(1, GGUFValueType.UINT32)
        )(writer)

    tokenizer = open_source(write(tmp_path, "llama", edit=edit).file).tokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}])
    assert ids == tokenizer.encode("the cat") and ids.count(1) == 1


def test_a_big_endian_file_is_reported(refusal, tmp_path):
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "a big-endian GGUF file" in refusal(tmp_path, "serve", "model.gguf")


def test_a_file_that_is_not_there_is_reported(refusal, tmp_path):
    assert "gone.gguf: no such file" in refusal(tmp_path, "serve", "gone.gguf")


def swap_tokens(i, j):
    def edit(writer):
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        tokens[i], tokens[j] = tokens[j], tokens[i]

    return edit


def test_a_draft_model_of_other_ids_is_reported(tmp_path):
    write(tmp_path / "a", "llama")
    folder = tmp_path / "b"
    write(folder, "llama", edit=swap_tokens(7, 8), vocab_size=352)
    with pytest.raises(
        ConfigError, match=r"b/model.gguf: its tokenizer differs .* \(8 there, 7 in"
    ):
        load_text_files(tmp_path / "a" / "model.gguf", folder / "model.gguf")


def test_the_text_of_a_file_needs_neither_torch_nor_numpy(tmp_path):
    file, _ = write(tmp_path, "llama")
    code = (
        "import sys; from pathlib import Path; sys.modules['transformers'] = None;"
        "sys.modules['torch'] = None; sys.modules['numpy'] = None;"
        "from specserve.api.input_processor import load_text_files;"
        f"files = load_text_files(Path({str(file)!r})); assert files.tokenizer.encode('the')"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
