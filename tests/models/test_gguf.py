"""A GGUF file is the same model as the checkpoint that means the same."""

import itertools
import os
import random
import shutil

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging

from specserve import LLM, SamplingParams
from specserve.config import load_config
from specserve.errors import ConfigError
from specserve.models.folder import name_of, resolve
from specserve.models.gguf import source as gguf_source
from specserve.models.gguf.header import OTHERS, TYPES, read_header
from specserve.models.gguf.tensors import BY_NAME
from specserve.models.loader import load_decoder
from specserve.models.quantized.config import Quantization
from specserve.models.quantized.formats import FORMATS
from specserve.models.quantized.stored import NotFinite
from specserve.models.rotary import frequencies
from specserve.models.selection import served_name
from specserve.models.source import open_source
from specserve.models.weight import Rounding
from specserve.models.weight_forms import MapForm
from specserve_kernels import Codes, cpu, reference
from tests.models import gguf_files
from tests.models.forward import logits, prompt
from tests.models.gguf_files import GEMMA3, TIED, WEIGHTS, WIDE, write

FLOAT = Rounding(activations="float")
QUANTIZED = [type.name for type in TYPES.values() if not type.is_plain]
# Of codes; those of other types have 4.
EIGHT_BITS = {"Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K", "Q8_K"}


def test_types_are_those_of_the_gguf_package():
    for number, type in TYPES.items():
        kind = GGMLQuantizationType(number)
        assert (type.name, gguf.GGML_QUANT_SIZES[kind]) == (kind.name, (type.width, type.size))
    for number, name in OTHERS.items():
        assert GGMLQuantizationType(number).name == name


def read(name, blocks):
    """The weight that is stored in blocks [N, blocks of a row, bytes]."""
    N, count, _ = blocks.shape
    told = Quantization(method="gguf")
    parts = {name: torch.from_numpy(blocks).view(N, -1)}
    return FORMATS[told.method](told).read((N, count * BY_NAME[name].width), parts)


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_mean_what_the_gguf_package_says(name):
    blocks = gguf_files.random_blocks(name, (64, 3), np.random.default_rng(0))
    for place in (gguf_files.SCALES | gguf_files.WRITTEN)[name]:
        scales = np.linspace(-2, 2, 64 * 3).reshape(64, 3, 1)
        gguf_files.put_scales(name, blocks, place, scales)
    want = gguf_files.dequantized(blocks.reshape(64, -1), GGMLQuantizationType[name])
    got = read(name, blocks)
    assert (got.bits, int(got.q.max()) >> got.bits) == (8 if name in EIGHT_BITS else 4, 0)
    assert np.array_equal(got.widen(torch.float32).numpy(), want)


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"])
def test_the_middle_of_the_codes_that_occur_is_that_of_all_codes(name):
    """So sums of codes and offsets cancel as little as they can."""
    blocks = np.random.default_rng(0).integers(64, size=(4, 3, BY_NAME[name].size), dtype=np.uint8)
    got = read(name, blocks)
    least, most = int(got.q.min()), int(got.q.max())
    assert least + most + 1 == 1 << got.bits and torch.equal(got.zero, least + 0 * got.zero)


@pytest.mark.parametrize("name", QUANTIZED)
def test_scales_that_are_not_finite_are_refused(name):
    blocks = np.full((2, 3, BY_NAME[name].size), 255, dtype=np.uint8)
    with pytest.raises(NotFinite, match=name):
        read(name, blocks)


@pytest.fixture(scope="module", params=gguf_files.TYPES)
def of_type(request, tmp_path_factory):
    """A llama, whose rows of queries and keys llama.cpp has in another order."""
    return write(tmp_path_factory.mktemp("model"), "llama", request.param, **WIDE)


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_logits_are_those_of_the_values_that_are_meant(of_type, ops):
    ids = prompt(320, 37)
    got = logits(load_decoder(of_type.file, "fp32", ops, rounding=FLOAT), ids)
    want = logits(load_decoder(of_type.plain, "fp32", ops), ids)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_transformers_reads_these_values(of_type, request):
    """So the checkpoint beside the file is right."""
    if request.node.callspec.params["of_type"] == "Q8_K":
        pytest.skip("the gguf package does not read the type")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(of_type.plain))
    logging.disable_progress_bar()
    read = load_gguf_checkpoint(str(of_type.file), return_tensors=True, model_to_load=model)
    want = load_file(of_type.plain / WEIGHTS)
    assert all(torch.equal(read["tensors"][name], tensor) for name, tensor in want.items())


ROPE = {"original_max_position_embeddings": 128, "rope_theta": 5e5, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SMOLLM3 = {"model_type": "smollm3", "num_hidden_layers": 4}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    },
    "original_max_position_embeddings": 128,
}
LLAMA4 = {  # what files have without saying so
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "no_rope_layers": [1, 1, 1, 0, 1],
    "num_hidden_layers": 5,
}
MODELS = {  # family, what departs from its tiny checkpoint
    "llama": ("llama", {}),
    "llama, tied": ("smollm", {}),
    "llama, every linear map with a bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("llama", SMOLLM3),
    "mixtral": ("mixtral", {}),
    "qwen2moe": ("qwen2_moe", {}),
    "qwen3moe": ("qwen3_moe", {}),
    "olmoe": ("olmoe", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "glm4": ("glm4", {}),
    "glm4, a share of each head rotates": ("glm4", {"head_dim": 32}),
    "phi3": ("phi3", {}),
    "phi3, long": ("phi3", LONG),
    "gemma2": ("gemma2", TIED | {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", GEMMA3),
    "gemma3, linear": ("gemma3", GEMMA3 | {"rope_parameters": {"full_attention": LINEAR}}),
    "cohere2": ("cohere2", TIED | {"num_hidden_layers": 5, "sliding_window_pattern": 4}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4, windows": ("exaone4", {"num_hidden_layers": 5, "sliding_window_pattern": 4}),
    "gpt-oss": ("gpt_oss", {"swiglu_limit": 7.0}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "command-r": ("cohere", TIED),
    "command-r plus": ("command_r_plus", TIED),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-moe": ("ernie4_5_moe", {"num_hidden_layers": 3}),
    "glm4moe": ("glm4_moe", {"use_qk_norm": False}),
    "glm4moe, normalized queries": ("glm4_moe", {}),
    "granitemoe": ("granite_moe", {}),
    "llama4": ("llama4", LLAMA4),
    "llama4, every second layer with experts": (
        "llama4",
        LLAMA4 | {"interleave_moe_layer_step": 2},
    ),
    "minimax-m2": ("minimax_m2", {}),
    "hunyuan-dense": ("hunyuan", {}),
    "lfm2": ("lfm2", {}),
    "lfm2moe": ("lfm2_moe", TIED | {"routed_scaling_factor": 1.0}),
    "mistral3": ("ministral3", {}),
    "nemotron": ("nemotron", {}),
    "nemotron_h": ("nemotron_h", {"mamba_head_dim": 16}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "sliding_window_pattern": 4}),
    "seed_oss": ("seed_oss", {}),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {}),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "rope llama3": ("llama", {"rope_parameters": ROPE | LLAMA3}),
    "rope yarn": ("qwen3", {"rope_parameters": ROPE | {"rope_type": "yarn"}}),
}


@pytest.mark.parametrize(("family", "overrides"), MODELS.values(), ids=MODELS)
def test_the_config_and_the_logits_are_those_of_the_checkpoint(tmp_path, family, overrides):
    file, plain = write(tmp_path, family, **overrides)
    open_source(file).check()
    got, want = open_source(file).config(), open_source(plain).config()
    D = want.head_dim
    torch.testing.assert_close(
        frequencies(got.rope_parameters, D), frequencies(want.rope_parameters, D), rtol=1e-6, atol=0
    )
    same = {"rope_parameters": want.rope_parameters, "architecture": "", "quantization": None}
    if "rope_type" not in overrides.get("rope_parameters", {"rope_type": "llama3"}):
        same.pop("rope_parameters")
    same |= {"local_rope_parameters": want.local_rope_parameters, "family": want.family}
    assert msgspec.structs.replace(got, **same) == msgspec.structs.replace(want, **same)
    ids = prompt(320, 61)
    models = [load_decoder(path, "fp32", reference, rounding=FLOAT) for path in (file, plain)]
    torch.testing.assert_close(*(logits(m, ids) for m in models), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("arch", "family"),
    [("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3_moe"), ("glm4", "glm4")],
)
def test_mrope_is_plain_rope(tmp_path, arch, family):
    """But a file of GLM-4 with M-RoPE has the even dimensions of what rotates before the odd."""
    order = [0, 2, 4, 6, 1, 3, 5, 7, *range(8, 16)]

    def edit(writer):
        writer.add_rope_dimension_sections([4, 2, 2, 0])
        for name, tensor in writer.tensors[0].items():
            if arch == "glm4" and name.split(".")[-2] in ("attn_q", "attn_k"):
                heads = tensor.tensor.reshape(-1, 16, *tensor.tensor.shape[1:])
                tensor.tensor = heads[:, order].reshape(tensor.tensor.shape)

    file, plain = write(tmp_path, family, arch=arch, edit=edit)
    open_source(file).check()
    models = [load_decoder(path, "fp32", reference, rounding=FLOAT) for path in (file, plain)]
    torch.testing.assert_close(*(logits(m, prompt(320, 37)) for m in models), rtol=1e-3, atol=1e-3)


def test_llama_4_may_have_full_attention_everywhere(tmp_path):
    edit = lambda writer: writer.add_sliding_window(0)  # noqa: E731
    config = open_source(write(tmp_path, "llama4", edit=edit, **LLAMA4).file).config()
    assert config.windows == (None,) * 5 and config.rope == (True,) * 5


def test_llama_4_of_128_experts_does_not_normalize_queries(tmp_path):
    sizes = {"num_local_experts": 128, "intermediate_size": 32}
    assert open_source(write(tmp_path, "llama4", **LLAMA4 | sizes).file).config().qk_norm == "none"


def test_mtp_layers_of_a_file_are_left_out(tmp_path, caplog):
    def edit(writer):
        writer.add_block_count(3)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.2.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))

    file, plain = write(tmp_path, "glm4_moe", edit=edit)
    open_source(file).check()
    assert "the file's MTP layers are not loaded" in caplog.text
    assert open_source(file).config().num_layers == 2
    models = [load_decoder(path, "fp32", reference, rounding=FLOAT) for path in (file, plain)]
    torch.testing.assert_close(*(logits(m, prompt(320, 29)) for m in models), rtol=1e-3, atol=1e-3)


def test_a_sliding_window_is_all_layers(tmp_path):
    file, _ = write(tmp_path, "llama", edit=lambda w: w.add_sliding_window(7))
    assert open_source(file).config().windows == (7, 7)


def test_the_old_key_of_linear_scaling_is_read(tmp_path):
    edit = lambda writer: writer.add_float32("qwen3.rope.scale_linear", 4.0)  # noqa: E731
    scaling = open_source(write(tmp_path, edit=edit).file).config().rope_parameters
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)


def test_what_a_file_leaves_out_has_llama_cpps_defaults(tmp_path):
    def leave_out(writer):
        for key in ("attention.head_count_kv", "attention.key_length", "rope.freq_base"):
            writer.kv_data[0].pop(f"qwen3.{key}")
        for key in ("attention.value_length", "rope.dimension_count"):
            writer.kv_data[0].pop(f"qwen3.{key}")

    file, _ = write(tmp_path, "qwen3", edit=leave_out, num_key_value_heads=4)
    config = open_source(file).config()
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.rope_parameters.theta == 10_000


def test_defaults_are_those_of_the_metadata(tmp_path):
    def edit(writer):
        writer.add_sampling_min_p(0.125)
        writer.add_sampling_penalty_repeat(1.5)

    defaults = open_source(write(tmp_path, edit=edit).file).defaults()
    assert (defaults.min_p, defaults.repetition_penalty) == (0.125, 1.5)


def test_defaults_and_chat_template_are_those_of_the_checkpoint(tmp_path):
    file, plain = map(open_source, write(tmp_path))
    assert file.defaults() == plain.defaults()
    assert [1] in file.ends().values() and plain.ends()["generation_config.json"] == [1]
    assert file.defaults().temperature == 0.5
    assert file.tokenizer().chat_template == plain.tokenizer().chat_template


@pytest.mark.parametrize(("type", "want"), [("F32", "fp32"), ("BF16", "bf16"), ("Q4_0", "bf16")])
def test_the_dtype_is_that_of_the_embedding(tmp_path, type, want):
    file, _ = write(tmp_path, type=type)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    ops = type_of_ops(has_bf16=True)
    assert load_decoder(file, "auto", ops).dtype == dtypes[want]


def type_of_ops(has_bf16):
    ops = dict(vars(reference)) | {"has_bf16": lambda: has_bf16}
    return type("Build", (), {k: staticmethod(v) if callable(v) else v for k, v in ops.items()})


def test_maps_of_several_types_make_one_model(tmp_path):
    kinds = {"attn_q": "Q4_K", "attn_v": "Q6_K", "ffn_up": "F16", "token_embd": "Q5_K"}
    pick = lambda name: kinds.get(name.split(".")[-2], "Q8_0")  # noqa: E731
    file, plain = write(tmp_path, "llama", pick, **WIDE)
    ids = prompt(320, 29)
    models = [load_decoder(path, "fp32", reference, rounding=FLOAT) for path in (file, plain)]
    torch.testing.assert_close(*(logits(m, ids) for m in models))


@pytest.mark.parametrize("name", QUANTIZED)
def test_an_embedding_stays_codes_of_the_same_values(tmp_path, name):
    file, plain = write(tmp_path, "smollm", name, **WIDE)
    table = load_file(plain / WEIGHTS)["model.embed_tokens.weight"]
    ids = torch.arange(len(table))
    for ops, dtype in itertools.product((reference, cpu), ("fp32", "bf16")):
        decoder = load_decoder(file, dtype, ops)
        assert decoder.weights.forms.embedding_bits == 8
        assert torch.equal(decoder.embed(ids), table.to(decoder.dtype))


def test_maps_stay_codes(tmp_path):
    """With a scale and an offset a group; one without an offset may stand beside others."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q5_1"}
    pick = lambda name: kinds.get(name.split(".")[-2], "Q4_K")  # noqa: E731
    file = write(tmp_path, "llama", pick, **WIDE).file
    forms = load_decoder(file, "bf16", reference, rounding=FLOAT).weights.forms
    assert forms.maps == (
        MapForm(4, 32, 2, has_offsets=True),
        MapForm(8, 16, 2, has_offsets=True),
        MapForm(8, 32, 2),
        MapForm(8, 32, 2, has_offsets=True),
        MapForm(4, 32, 1, has_offsets=True, is_head=True),
    )
    bits = {"head": 320 * 256 * 6, "gate and up": 2 * 512 * 256 * 6, "down": 2 * 256 * 256 * 10}
    bits |= {"q, k and v": 2 * 128 * 256 * 12, "out": 2 * 256 * 64 * 9}
    # Beside a byte for each code: a scale, an offset and a zero for 32 of them.
    bits |= {"embedding": 320 * 256 * 8 + 320 * 8 * (32 + 32 + 8), "norms": 5 * 256 * 32}
    assert forms.num_bytes == sum(bits.values()) // 8


NEW = 16
PROMPTS = [[(7 * i * i + n) % 300 + 2 for i in range(n)] for n in (1, 16, 40)]


def greedy(model, ids):
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        do_sample=False,
        max_new_tokens=NEW,
    )
    return out[0, len(ids) :].tolist()


TEXTS = {  # family, type, what departs from its tiny checkpoint
    "llama": ("llama", "Q4_K", {}),
    "qwen3": ("qwen3", "Q5_K", {}),
    "gemma3": ("gemma3", "Q3_K", GEMMA3),
    "qwen3moe": ("qwen3_moe", "IQ4_XS", {"moe_intermediate_size": 256}),
    "gpt-oss": ("gpt_oss", "Q2_K", {"swiglu_limit": 7.0}),
}


@pytest.mark.parametrize(("family", "type", "overrides"), TEXTS.values(), ids=TEXTS)
def test_greedy_tokens_are_those_of_transformers(tmp_path, family, type, overrides):
    fields = WIDE | overrides
    target = write(tmp_path / "a", family, type, seed=1, **fields)
    small = fields | {"num_hidden_layers": 1}
    draft = write(tmp_path / "b", family, "Q6_K", seed=1, **small)
    model = AutoModelForCausalLM.from_pretrained(target.plain, dtype=torch.float32)
    want = [greedy(model, ids) for ids in PROMPTS]
    settings = {"model.threads": 1, "memory.kv_bytes": 1 << 26, "model.dtype": "fp32"}
    settings["model.activations"] = "float"
    settings["scheduler.max_model_len"] = 256  # gpt-oss has a long context
    params = SamplingParams(temperature=0, max_tokens=NEW)
    for drafter, draft_model in {"none": None, "ngram": None, "model": draft.file}.items():
        with LLM(target.file, draft_model, drafter, set=settings, progress=False) as llm:
            assert [out.token_ids for out in llm.generate(PROMPTS, params)] == want


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL"])
def test_activations_have_8_bits_unless_a_setting_says_float(tmp_path, type):
    """As in llama.cpp; logits then differ a little."""
    file, ids = write(tmp_path, "llama", type, **WIDE).file, prompt(320, 37)
    models = {
        asked: load_decoder(file, "fp32", cpu, rounding=Rounding.named(None, "w8", "none", asked))
        for asked in ("auto", "int8", "float")
    }
    forms = {asked: model.weights.forms for asked, model in models.items()}
    assert forms["auto"] == forms["int8"]
    assert {form.activation_bits for form in forms["int8"].maps} == {8}
    assert {form.activation_bits for form in forms["float"].maps} == {None}
    rounded, exact = (logits(models[asked], ids) for asked in ("int8", "float"))
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()  # weights are random


def test_no_drafter_changes_the_text_with_8_bit_activations(tmp_path):
    target = write(tmp_path / "a", "qwen3", "Q4_K", seed=1, **WIDE)
    draft = write(tmp_path / "b", "qwen3", "Q6_K", seed=1, **WIDE | {"num_hidden_layers": 1})
    settings = {"model.threads": 1, "memory.kv_bytes": 1 << 26}
    params, texts = SamplingParams(temperature=0, max_tokens=NEW), []
    for drafter, draft_model in {"none": None, "ngram": None, "model": draft.file}.items():
        with LLM(target.file, draft_model, drafter, set=settings, progress=False) as llm:
            texts.append([out.token_ids for out in llm.generate(PROMPTS, params)])
            assert llm.weights.target.decoder.forms.num_rounding
    assert texts[0] == texts[1] == texts[2]


def test_parts_make_one_model(tmp_path):
    whole = write(tmp_path / "whole", "llama")
    first = write(tmp_path / "parts", "llama", parts=8).file
    assert first.name == "model-00001-of-00003.gguf"
    open_source(first).check()
    ids = prompt(320, 29)
    models = [load_decoder(path, "fp32", reference) for path in (whole.file, first)]
    torch.testing.assert_close(*(logits(m, ids) for m in models), rtol=0, atol=0)


def second(path):
    return path.with_name(path.name.replace("-00001-", "-00002-"))


def test_wrong_parts_are_refused(tmp_path):
    first = write(tmp_path, "llama", parts=8).file
    with pytest.raises(ConfigError, match=r"not the first part\. Name model-00001-of-00003"):
        open_source(second(first)).check()
    renamed = shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(ConfigError, match="is one of 3 parts, but its name"):
        open_source(renamed).check()
    shutil.copy(first, second(first))
    with pytest.raises(ConfigError, match=r"00002-of-00003\.gguf .*is in another part too"):
        open_source(first).check()
    second(first).unlink()
    with pytest.raises(ConfigError, match=r"00002-of-00003\.gguf is missing"):
        open_source(first).check()


def test_a_part_that_is_a_link_out_of_the_folder_is_refused(tmp_path):
    first = write(tmp_path / "model", "llama", parts=8).file
    outside = second(first).rename(tmp_path / "outside.gguf")
    second(first).symlink_to(outside)
    with pytest.raises(
        ConfigError, match=r"00002-of-00003\.gguf is a link to .*, outside of the folder"
    ):
        open_source(first).check()


@pytest.mark.parametrize("below", [".", "Q8_0/parts"])
def test_parts_in_the_hubs_cache_are_links(tmp_path, below):
    repository = tmp_path / "models--org--name"
    folder = repository / "snapshots" / ("0" * 40) / below
    folder.mkdir(parents=True)
    first = write(folder, "llama", parts=8).file
    blobs = repository / "blobs"
    blobs.mkdir()
    for part in folder.glob("*.gguf"):
        part.rename(blobs / part.name)
        part.symlink_to(blobs / part.name)
    open_source(first).check()


def test_a_lie_about_the_parts_is_refused(tmp_path):
    first = write(tmp_path, "llama", parts=8).file
    data = first.read_bytes()
    place = data.index(b"split.tensors.count") + len("split.tensors.count") + 4
    first.write_bytes(data[:place] + bytes([data[place] + 1]) + data[place + 1 :])
    with pytest.raises(ConfigError, match="its parts have 21 tensors, not 22"):
        open_source(first).check()


@pytest.mark.parametrize("count", ["x", [1, 2]], ids=["text", "an array"])
def test_a_count_of_parts_is_a_number(tmp_path, count):
    add = "add_string" if isinstance(count, str) else "add_array"
    edit = lambda writer: getattr(writer, add)("split.count", count)  # noqa: E731
    file = write(tmp_path, "llama", edit=edit).file
    with pytest.raises(ConfigError, match=r"split\.count is not a number"):
        open_source(file).check()


def test_a_header_is_read_again_after_a_change(tmp_path):
    file, _ = write(tmp_path)
    before = read_header(file)
    assert read_header(file) is before
    os.utime(file, (1, 1))
    assert read_header(file) is not before


def test_a_folder_may_hold_one_file(tmp_path):
    file = write(tmp_path / "a").file
    shutil.rmtree(tmp_path / "a" / "plain")
    assert resolve(str(file.parent)) == file
    shutil.copy(file, file.with_name("another.gguf"))
    with pytest.raises(ConfigError, match=r"2 models \(another\.gguf, model\.gguf\)\. Name one"):
        resolve(str(file.parent))
    parts = write(tmp_path / "b", parts=8).file
    assert resolve(str(parts.parent)) == parts


@pytest.mark.parametrize("name", ["model.bin", "sha256-0f1e", "weights.GGUF", "v1.5-Q4"])
def test_a_file_is_recognised_by_its_first_bytes(tmp_path, name):
    written = write(tmp_path / "a", "llama").file
    shutil.rmtree(tmp_path / "a" / "plain")
    file = written.rename(written.with_name(name))
    (file.parent / "README").write_text("no model")
    assert resolve(str(file)) == resolve(str(file.parent)) == file
    assert name_of(str(file)) == name
    open_source(file).check()
    assert load_decoder(file, "fp32", reference).config.num_layers == 2
    shutil.copy(file, file.with_name("z"))
    with pytest.raises(ConfigError, match=rf"2 models \({name}, z\)\. Name one"):
        resolve(str(file.parent))
    shutil.copy(file, file.with_name("model.gguf"))
    assert resolve(str(file.parent)) == file.with_name("model.gguf")


def test_a_git_lfs_pointer_in_the_place_of_a_file_is_named_as_one(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 42\n"
    for name in "model.gguf", "model":
        (tmp_path / name).write_text(pointer)
        with pytest.raises(ConfigError, match=rf"{name} is a Git LFS pointer, .* `git lfs pull`"):
            open_source(resolve(str(tmp_path / name))).check()


def test_a_part_that_is_a_git_lfs_pointer_is_named_as_one(tmp_path):
    first = write(tmp_path, "llama", parts=8).file
    second(first).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"00002-of-00003\.gguf is a Git LFS pointer"):
        open_source(first).check()


def test_a_file_may_list_its_layers_with_windows(tmp_path):
    edit = lambda writer: writer.add_sliding_window_pattern([False, True] * 3 + [False])  # noqa: E731
    file, _ = write(tmp_path, "gemma3", edit=edit, **GEMMA3)
    assert open_source(file).config().windows == (None, 7, None, 7, None, 7, None)


def test_a_file_may_name_the_base_of_layers_with_windows(tmp_path):
    edit = lambda writer: writer.add_rope_freq_base_swa(30_000.0)  # noqa: E731
    config = open_source(write(tmp_path, "gemma3", edit=edit, **GEMMA3).file).config()
    assert (config.rope_parameters.theta, config.local_rope_parameters.theta) == (1e6, 3e4)


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_queries_of_the_largest_gemmas_are_scaled_by_the_width(tmp_path, family, layers):
    sizes = {"num_hidden_layers": layers, "hidden_size": 96, "vocab_size": 320} | TIED
    config = open_source(write(tmp_path, family, **sizes).file).config()
    assert config.score_scale == pytest.approx(24**-0.5)


def test_experts_may_have_gates_and_ups_in_one_tensor(tmp_path):
    def edit(writer):
        [tensors] = writer.tensors
        for i in range(2):
            gate, up = (tensors.pop(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up"))
            both = np.concatenate([gate.tensor, up.tensor], axis=1)
            writer.add_tensor(f"blk.{i}.ffn_gate_up_exps.weight", both, raw_dtype=gate.dtype)

    file, plain = write(tmp_path, "qwen3_moe", edit=edit)
    open_source(file).check()
    models = [load_decoder(path, "fp32", reference, rounding=FLOAT) for path in (file, plain)]
    torch.testing.assert_close(*(logits(m, prompt(320, 29)) for m in models))


def test_old_files_of_qwen_lack_the_widths_of_experts(tmp_path):
    def edit(writer):
        for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
            writer.kv_data[0].pop(f"qwen2moe.{key}")

    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
    open_source(write(tmp_path, "qwen2_moe", edit=edit, **sizes).file).check()


def test_experts_of_quantized_types_stay_codes(tmp_path):
    pick = lambda name: "MXFP4" if "exps" in name else "Q8_0"  # noqa: E731
    file, plain = write(tmp_path, "gpt_oss", pick, swiglu_limit=7.0)
    models = [load_decoder(path, "fp32", reference, rounding=FLOAT) for path in (file, plain)]
    torch.testing.assert_close(*(logits(m, prompt(320, 29)) for m in models))
    each = models[0].weights.layers[0].experts.gate_up.each[0]
    assert isinstance(each, Codes) and each.group == 32


def test_yarn_raises_the_context_of_a_file(tmp_path):
    rope = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
    file, plain = write(tmp_path, "qwen2", rope_parameters=rope, max_position_embeddings=250)
    assert open_source(file).config().max_positions == 800
    assert open_source(plain).config().max_positions == 800


def test_a_folder_with_safetensors_is_a_checkpoint(tmp_path):
    file, plain = write(tmp_path)
    shutil.copy(file, plain)
    assert resolve(str(plain)) == plain
    (plain / WEIGHTS).unlink()
    assert resolve(str(plain)) == plain / file.name


@pytest.mark.parametrize(
    ("path", "name"),
    [("a/b/Qwen3-0.6B-Q8_0.gguf", "Qwen3-0.6B-Q8_0"), ("big-00001-of-00003.gguf", "big")],
)
def test_the_name_is_the_files(path, name):
    assert name_of(path) == name
    assert served_name(load_config(None, {"model.path": path})) == name


def test_files_differ_in_identity(tmp_path):
    parts = [
        b"".join(open_source(write(tmp_path / str(i), seed=seed).file).identity())
        for i, seed in enumerate((0, 0, 1))
    ]
    assert parts[0] == parts[1] != parts[2]


def test_all_of_the_header_counts_for_the_identity_and_the_size_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_source, "BEGINNING", 0)
    monkeypatch.setattr("specserve.models.folder.SAMPLES", 0)
    file, _ = write(tmp_path)
    before = b"".join(open_source(file).identity())
    data = file.read_bytes()
    file.write_bytes(data + bytes(32))
    assert b"".join(open_source(file).identity()) != before
    file.write_bytes(data.replace(b"assistant: ", b"Assistant: "))
    assert b"".join(open_source(file).identity()) != before


def test_a_damaged_file_is_refused_and_nothing_else_happens(tmp_path):
    """Wherever it is cut, and whatever numbers its header has."""
    file, _ = write(tmp_path)
    data, end, dice = file.read_bytes(), read_header(file).data_offset, random.Random(0)
    numbers = [bytes(8), b"\xff" * 8, (1 << 62).to_bytes(8, "little"), dice.randbytes(8)]
    cuts = [data[: dice.randrange(len(data))] for _ in range(100)]
    places = [
        dice.choice((dice.randrange(end), dice.randrange(end - 2500, end))) for _ in range(400)
    ]
    lies = [
        data[:place] + number[:size] + data[place + size :]
        for place, number, size in zip(places, itertools.cycle(numbers), itertools.cycle((1, 8, 4)))
    ]
    for number, content in enumerate([*cuts, *lies]):
        broken = tmp_path / f"{number}.gguf"
        broken.write_bytes(content)
        try:
            source = open_source(broken)
            source.config(), source.check(), source.tokenizer(), source.defaults()
            source.ends()
        except ConfigError as e:
            assert str(e).startswith(str(broken)) and "\n" not in str(e)
        else:
            assert content in lies, "a file that is cut is refused"
