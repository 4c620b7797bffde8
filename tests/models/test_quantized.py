"""Checkpoints of other tools: their maps mean what those tools say that they mean."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specserve.cli import command as cli
from specserve.errors import ConfigError
from specserve.models.loader import load_decoder
from specserve.models.parse_config import load_config
from specserve.models.quantized import config
from specserve_kernels import cpu, reference
from tests.checkpoints import tiny_checkpoint
from tests.models.formats import (
    FIXTURES,
    FORMATS,
    LAYER,
    WEIGHTS,
    change_config,
    digests,
    plain,
    quantized,
    values,
    weights_only,
)
from tests.models.forward import logits, prompt

Q, K, UP = (f"{LAYER}.{m}_proj" for m in ("self_attn.q", "self_attn.k", "mlp.up"))
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


def of_library(name):
    """The digests of the maps that are quantized, in the values of the library that stored them."""
    stored = load_file(FIXTURES / f"{name}.safetensors")
    has_more = {key.rpartition(".")[0] for key in stored if not key.endswith("_proj.weight")}
    return {module: d for module, d in FORMATS[name]["values"].items() if module in has_more}


@pytest.mark.parametrize("name", FORMATS)
def test_maps_have_the_bits_that_the_library_which_stored_them_gives(tmp_path, name):
    got = values(quantized(tmp_path / "model", name))
    assert digests(got) == of_library(name)


@pytest.mark.parametrize("name", FORMATS)
def test_in_bf16_they_are_rounded_once(tmp_path, name):
    folder = quantized(tmp_path / "model", name)
    want = {module: exact.bfloat16() for module, exact in values(folder).items()}
    assert digests(values(folder, torch.bfloat16)) == digests(want)


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_values(tmp_path, name, ops):
    folder = quantized(tmp_path / "quantized", name, told=weights_only(name))
    check_logits(folder, tmp_path / "plain", ops)


def check_logits(folder, plain_folder, ops=reference):
    ids = prompt(320, 37)
    want = logits(load_decoder(plain(plain_folder, folder), "fp32", ops), ids)
    got = logits(load_decoder(folder, "fp32", ops), ids)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


ALL_MAPS = ["re:.*", "lm_head", *FORMATS["gptq-v1"]["values"]]
UNTOLD = {  # fixture, what config.json says and the tensors show otherwise
    "files of GPTQ's second form that claim to be of the first": (
        "gptq-v2",
        {"checkpoint_format": "gptq", "format": "gptq"},
    ),
    "the form under its other name": ("gptq-v2-asym", {"checkpoint_format": None}),
    "neither name of the form": ("gptq-v1-asym", {"checkpoint_format": None, "format": None}),
    "a layout in capitals": ("awq", {"version": "GEMM"}),
    "maps that are ignored, and quantized": ("compressed-w4a16", {"ignore": ALL_MAPS}),
    "modules not to convert that were": ("fp8-block", {"modules_to_not_convert": ALL_MAPS}),
    "modules that are left out": ("gptq-v1", {"dynamic": {"-:lm_head": {}}}),
    "blocks of 128, which are not written": ("fp8-static", {"weight_block_size": None}),
}


@pytest.mark.parametrize(("name", "told"), UNTOLD.values(), ids=UNTOLD)
def test_the_tensors_decide_where_config_json_is_wrong_or_silent(tmp_path, name, told):
    got = values(quantized(tmp_path / "model", name, told=told))
    assert digests(got) == of_library(name)


def replace(module, tensor):
    """A plain map in the place of a quantized one."""

    def edit(tensors):
        for name in [name for name in tensors if name.startswith(f"{module}.")]:
            del tensors[name]
        tensors[f"{module}.weight"] = tensor

    return edit


def test_a_map_may_be_plain_though_no_list_says_so(tmp_path):
    folder = quantized(tmp_path / "quantized", "gptq-v1", replace(K, torch.randn(32, 32)))
    assert values(folder).keys() == FORMATS["gptq-v1"]["values"].keys() - {K}
    check_logits(folder, tmp_path / "plain")


def vocabulary(module, *, copies=10):
    """A table of 320 rows, which are those of q_proj over and over."""

    def edit(tensors):
        tensors.pop(f"{module}.weight", None)
        for name, part in list(tensors.items()):
            if name.startswith(f"{Q}."):
                is_shape = name.endswith("weight_shape")
                rows = torch.tensor([320, 32]) if is_shape else part.repeat(copies, 1)
                tensors[name.replace(Q, module)] = rows

    return edit


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("module", [HEAD, EMBEDDING])
@pytest.mark.parametrize("name", ["compressed-w8a16", "compressed-fp8-dynamic"])
def test_the_head_and_the_embedding_may_be_quantized(tmp_path, name, module, is_tied):
    """A tied head too: it is the embedding, or a map of its own."""
    folder = quantized(tmp_path / "model", name, vocabulary(module), tie_word_embeddings=is_tied)
    assert digests(values(folder))[module] is not None
    check_logits(folder, tmp_path / "plain")
    load_decoder(folder, "auto", reference)


def test_a_tied_head_is_the_embedding_that_stays_plain(tmp_path):
    folder = quantized(tmp_path / "quantized", "awq", tie_word_embeddings=True)
    check_logits(folder, tmp_path / "plain")


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    "name", ["compressed-w4a16", "compressed-w8a8-static", "compressed-fp8-static"]
)
def test_scales_of_activations_change_nothing(tmp_path, name):
    """Each row gets its own scale, if any."""
    scale = torch.tensor(float("nan"), dtype=torch.float64)
    folder = quantized(tmp_path / "model", name, put(f"{UP}.input_scale", scale))
    assert digests(values(folder)) == of_library(name)


@pytest.mark.parametrize("block", [[2**40, 2**40], [16, 8]])
def test_a_scale_for_a_whole_map_is_none_of_its_blocks(tmp_path, block):
    def square(tensors):
        scales = [name for name in tensors if name.endswith("weight_scale_inv")]
        tensors.update({name: tensors[name].view(1, 1) for name in scales})

    name = "fp8-static"
    folder = quantized(tmp_path / "model", name, square, {"weight_block_size": block})
    assert digests(values(folder)) == of_library(name)


def test_blocks_have_the_size_that_transformers_gives_them_where_none_is_written():
    assert config.parse({"quantization_config": {"quant_method": "fp8"}}).block == (128, 128)


def test_a_zero_point_below_the_middle_stays_there(tmp_path):
    """Where quantization is symmetric, it would be the middle, less one."""

    def weight(zero, **told):
        edit = put(f"{UP}.qzeros", torch.full((2, 4), zero, dtype=torch.int32))
        return values(quantized(tmp_path / f"{zero}{told}", "gptq-v2-asym", edit, told))[UP]

    seven, eight = 0x77777777, 0x88888888 - 2**32
    assert not weight(seven).equal(weight(eight))
    assert weight(seven, sym=True).equal(weight(eight, sym=True))


def test_columns_of_compressed_tensors_may_be_in_another_order(tmp_path):
    def flip(tensors):
        """Both, so that the values are the same."""
        tensors[f"{UP}.weight_g_idx"] = (torch.arange(32) // 16).flip(0).int()
        tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"].flip(1).contiguous()

    name = "compressed-w8a16"
    assert digests(values(quantized(tmp_path / "model", name, flip))) == of_library(name)


def test_the_old_name_of_the_config_is_known(tmp_path):
    name = "compressed-w8a8"
    folder, told = quantized(tmp_path / "model", name), FORMATS[name]["quantization_config"]
    change_config(folder, quantization_config=None, compression_config=told)
    assert digests(values(folder)) == of_library(name)


def cut(name):
    return lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()})


def drop(name):
    return lambda tensors: tensors.pop(name)


def spoil(name, value):
    return lambda tensors: tensors[name].view(-1)[-1:].fill_(value)


NOT_FINITE = "has values that are not finite"
BROKEN = {  # fixture, what happened to its tensors -> the complaint
    "no scales": ("gptq-v1", drop(f"{UP}.scales"), f"{UP}.scales is missing"),
    "no zero points": ("awq", drop(f"{UP}.qzeros"), f"{UP}.qzeros is missing"),
    "no scale of floats": (
        "fp8-block",
        drop(f"{UP}.weight_scale_inv"),
        f"{UP}.weight_scale is missing",
    ),
    "no scale of bytes": (
        "compressed-w8a8",
        drop(f"{UP}.weight_scale"),
        f"{UP}.weight_scale is missing",
    ),
    "no integers": (
        "compressed-w4a16",
        drop(f"{UP}.weight_packed"),
        f"{UP}.weight is missing",
    ),
    "no shape": (
        "compressed-w4a16",
        drop(f"{UP}.weight_shape"),
        f"{UP}.weight_shape is missing",
    ),
    "a shape that lies": (
        "compressed-w4a16",
        put(f"{UP}.weight_shape", torch.tensor([256, 12])),
        rf"{UP}: weight_shape is not \[12, 256\]",
    ),
    "scales of another group": (
        "gptq-v1",
        cut(f"{UP}.scales"),
        r"scales has the shape \[1, 32\]",
    ),
    "scales that do not divide": (
        "compressed-w8a16",
        put(f"{UP}.weight_scale", torch.ones(32, 3)),
        f"{UP}: weight_scale has 3 columns, which do not divide 32",
    ),
    "scales of no group": (
        "compressed-w8a16",
        put(f"{UP}.weight_scale", torch.ones(32, 0)),
        f"{UP}: weight_scale has 0 columns, which do not divide 32",
    ),
    "integers of 3 bits": (
        "compressed-w4a16-channel",
        put(f"{UP}.weight_packed", torch.zeros(32, 3, dtype=torch.int32)),
        f"{UP}: weight_packed has .3. columns, which fit 32 values of neither 4 nor 8 bits",
    ),
    "fewer integers": ("awq", cut(f"{UP}.qweight"), r"qweight has the shape \[31, 4\]"),
    "one block too few": ("fp8-block", cut(f"{UP}.weight_scale_inv"), "weight_scale_inv has the"),
    "a scale that is no number": (
        "compressed-w4a16",
        spoil(f"{UP}.weight_scale", float("nan")),
        rf"model\.safetensors: the tensor {UP}.weight_scale {NOT_FINITE}",
    ),
    "an infinite scale": (
        "gptq-v1",
        spoil(f"{UP}.scales", float("inf")),
        f"{UP}.scales {NOT_FINITE}",
    ),
    "an infinite scale of a block": (
        "fp8-block",
        spoil(f"{UP}.weight_scale_inv", float("inf")),
        f"{UP}.weight_scale_inv {NOT_FINITE}",
    ),
    "a float of 8 bits that is no number": (
        "fp8-block",
        lambda tensors: tensors[f"{UP}.weight"].view(torch.uint8)[0, :1].fill_(0x7F),
        f"{UP}.weight {NOT_FINITE}",
    ),
    "a float of 8 bits that overflows with its scale": (
        "fp8-block",
        spoil(f"{UP}.weight_scale_inv", 3e38),
        f"{UP}.weight {NOT_FINITE}",
    ),
    "no map at all": (
        "gptq-v1",
        lambda tensors: [drop(name)(tensors) for name in [*tensors] if name.startswith(UP)],
        f"{UP}.weight is missing",
    ),
    "a group before the first": (
        "gptq-reordered",
        spoil(f"{UP}.g_idx", -1),
        "g_idx has invalid groups",
    ),
    "a group that is not there": (
        "gptq-reordered",
        spoil(f"{UP}.g_idx", 2),
        f"{UP}: g_idx has invalid groups: there are only 2",
    ),
    "a bias that nothing adds": (
        "gptq-auto",
        spoil(f"{UP}.bias", 1),
        f"{UP}: it has a bias, but config.json describes none",
    ),
    "a tensor of another format": (
        "awq",
        put(f"{UP}.weight_packed", torch.zeros(2)),
        "weight_packed is not part of",
    ),
}


@pytest.mark.parametrize(("name", "edit", "complaint"), BROKEN.values(), ids=BROKEN)
def test_broken_maps_are_refused(tmp_path, name, edit, complaint):
    folder = quantized(tmp_path / "model", name, edit)
    with pytest.raises(ConfigError, match=complaint) as refusal:
        load_decoder(folder, "fp32", reference)
    assert str(refusal.value).startswith((f"{folder}: ", f"{folder}/model")) and ". " in str(
        refusal.value
    )


def shorten(folder):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def told(**fields):
    fields = FORMATS["gptq-v1"]["quantization_config"] | fields
    return lambda folder: change_config(folder, quantization_config=fields)


FATAL = {  # what is broken -> the command's complaint
    "a truncated file": (shorten, "model.safetensors is not a valid safetensors file"),
    "no config of it": (
        lambda folder: change_config(folder, quantization_config=None),
        f"{Q}: it has g_idx, qweight, qzeros, scales, but config.json has no quantization_config",
    ),
    "another group": (
        told(group_size=8),
        r"qzeros has the shape \[2, 4\], but config.json requires",
    ),
    "a group that does not divide": (told(group_size=48), "group_size: 32 is not a multiple of 48"),
}


@pytest.mark.parametrize(("spoil", "complaint"), FATAL.values(), ids=FATAL)
def test_the_command_ends_with_one_line(tmp_path, capsys, spoil, complaint):
    folder = quantized(tmp_path / "model", "gptq-v1")
    spoil(folder)
    assert re.search(complaint, refusal(folder, capsys))


@pytest.mark.parametrize("what", ["no scales", "a shape that lies", "a scale that is no number"])
def test_the_command_ends_with_one_line_for_broken_maps(tmp_path, capsys, what):
    name, edit, complaint = BROKEN[what]
    assert re.search(complaint, refusal(quantized(tmp_path / "model", name, edit), capsys))


def refusal(folder, capsys):
    """The command's last line."""
    assert cli.main(["generate", "a", "--model", str(folder), "--max-tokens=1"]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {folder}")
    return line


def compressed(form="pack-quantized", weights=(), **fields):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4}}}
    groups["group_0"]["weights"] |= dict(weights)
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups} | fields


def blocks_of(size):
    return {"weights": {"type": "float", "num_bits": 8, "block_structure": [size, size]}}


REFUSED = {  # quantization_config -> the complaint
    "no method": ({"bits": 4}, "quant_method = None.*only .*gptq, awq, fp8, mxfp4"),
    "another method": ({"quant_method": "bitsandbytes"}, "'bitsandbytes'.*Use another"),
    "a method that is no name": ({"quant_method": ["awq"]}, "quant_method = .'awq'. is not"),
    "no object": ("gptq", "quantization_config = 'gptq' is not an object"),
    "3 bits": ({"quant_method": "gptq", "bits": 3}, "bits = 3 is not supported, only 4, 8"),
    "bits in words": ({"quant_method": "gptq", "bits": "4"}, "bits = '4'"),
    "a group of 0": ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size = 0"),
    "settings by module": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}, "a": {"bits": 8}}},
        "dynamic: settings per module",
    ),
    "settings in a list": (
        {"quant_method": "gptq", "bits": 4, "dynamic": ["-:lm_head"]},
        "dynamic: settings per module",
    ),
    "a layout for one kernel": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        "checkpoint_format = 'marlin'",
    ),
    "another layout": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'"),
    "another float": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
    "half a block": (
        {"quant_method": "fp8", "weight_block_size": [128]},
        r"weight_block_size = \[128\] must be a pair",
    ),
    "half a structure": (
        compressed("float-quantized", {"block_structure": [128], "type": "float", "num_bits": 8}),
        r"block_structure = \[128\] must be a pair",
    ),
    "several structures": (
        compressed(config_groups={"a": blocks_of(16), "b": blocks_of(32)}),
        "blocks of several sizes are not supported",
    ),
    "no groups": (compressed(config_groups=[]), r"config_groups = \[\] is not an object"),
    "2 bits": (compressed(weights={"num_bits": 2}), "type 'int' and 2 bits are not supported"),
    "floats of 4 bits": (
        compressed("mixed-precision", {"type": "float"}),
        "type 'float' and 4 bits are not supported",
    ),
    "another compression": (
        compressed("nvfp4-pack-quantized"),
        "format = 'nvfp4-pack-quantized' is not supported",
    ),
    "sparse": (compressed(sparsity_config={"format": "sparse-24"}), "sparse-24"),
    "rotated": (compressed(transform_config={"config_groups": {}}), "transform_config is not"),
    "KV of 8 bits beside fp8": (
        {"quant_method": "fp8", "kv_cache_scheme": "static"},
        "kv_cache_scheme is not",
    ),
    "KV of 8 bits": (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is not"),
}


@pytest.mark.parametrize(("told", "complaint"), REFUSED.values(), ids=REFUSED)
def test_quantizations_that_are_not_supported_are_refused_before_weights_are_read(
    tmp_path, told, complaint
):
    tiny_checkpoint(tmp_path)
    change_config(tmp_path, quantization_config=told)
    with pytest.raises(ConfigError, match=complaint):
        load_config(tmp_path)


def test_the_page_about_formats_names_each_of_them():
    page = (Path(__file__).parents[2] / "docs" / "quantized.md").read_text()
    assert all(f"`{name}`" in page for name in (*config.METHODS, *config.COMPRESSED))


def test_what_is_not_compressed_needs_no_format_of_its_own(tmp_path):
    tiny_checkpoint(tmp_path)
    change_config(tmp_path, quantization_config=compressed("dense", config_groups={}))
    load_decoder(tmp_path, "auto", reference)
