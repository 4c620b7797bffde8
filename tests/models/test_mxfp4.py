"""gpt-oss: experts that share tensors, in bf16 or MXFP4, mean what transformers takes them for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specserve.cli import command as cli
from specserve.errors import ConfigError
from specserve.models.loader import load_decoder, open_reader, weight_bytes
from specserve.models.parse_config import load_config
from specserve.models.weight import AS_STORED, Rounding
from specserve_kernels import cpu, reference
from tests.checkpoints import tiny_checkpoint
from tests.models.forward import logits, prompt

EXPERTS = "model.layers.{}.mlp.experts"
MXFP4 = {"quant_method": "mxfp4"}
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def random_blocks(outputs, columns, low=118, high=124):
    blocks = torch.randint(256, (6, outputs, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(low, high, blocks.shape[:3], dtype=torch.uint8)


@pytest.fixture
def folders(tmp_path):
    """The same model in MXFP4, and in the numbers that transformers makes of it."""
    torch.manual_seed(0)
    coded, plain = (tiny_checkpoint(tmp_path / name, "gpt_oss", **SIZES) for name in ("4", "32"))
    tensors = load_file(coded / "model.safetensors")
    wide = dict(tensors)
    for layer in range(2):
        for name, outputs, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            key = f"{EXPERTS.format(layer)}.{name}"
            blocks, scales = random_blocks(outputs, columns)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            wide[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            del tensors[key]
    save_file(tensors, coded / "model.safetensors")
    save_file(wide, plain / "model.safetensors")
    change_config(coded, quantization_config=MXFP4)
    return coded, plain


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensor(folder, name, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path)


def reader_of(folder):
    return open_reader(folder, load_config(folder), "fp32", reference, AS_STORED)


def test_maps_have_the_values_of_transformers(folders):
    coded, plain = map(reader_of, folders)
    modules = [name.removesuffix(".weight") for name in coded.maps.shapes]
    assert len(modules) == 2 * 6 * 3
    for module in modules:
        got, want = coded.weight(module), plain.weight(module)
        assert (got.bits, got.group) == (4, 32)
        assert torch.equal(got.widen(torch.float32), want), module


def test_every_scale_is_read(folders):
    coded, plain = folders
    blocks, _ = random_blocks(192, 64)
    # The last two make floats of 32 bits overflow.
    scales = (torch.arange(6 * 192 * 2) % 253).to(torch.uint8).view(6, 192, 2)
    key = f"{EXPERTS.format(0)}.gate_up_proj"
    change_tensor(coded, f"{key}_blocks", lambda _: blocks)
    change_tensor(coded, f"{key}_scales", lambda _: scales)
    wide = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    change_tensor(plain, key, lambda _: wide)
    for e in range(6):
        for kind in ("gate", "up"):
            module = f"{EXPERTS.format(0)}.{e}.{kind}_proj"
            got, want = (reader_of(folder).weight(module) for folder in folders)
            assert torch.equal(got.widen(torch.float32), want), module


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_logits_are_those_of_the_values(folders, ops):
    ids = prompt(320, 37)
    got, want = (logits(load_decoder(folder, "fp32", ops), ids) for folder in folders)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", [0, 1], ids=["MXFP4", "plain"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_bytes_in_memory_are_known_before_it_is_loaded(folders, which, dtype):
    folder = folders[which]
    loaded = load_decoder(folder, dtype, reference).forms.num_bytes
    assert weight_bytes(folder, dtype, reference) == loaded


def test_experts_of_a_plain_checkpoint_are_rounded_as_others(folders):
    model = load_decoder(folders[1], "fp32", reference, rounding=Rounding(8, 8))
    assert {(form.bits, form.is_head) for form in model.forms.maps} == {
        (32, False),  # routers
        (8, False),
        (8, True),
    }


SPOILED = {  # tensor, what is made of it, words of the complaint
    "a scale that is no number": (
        "gate_up_proj_scales",
        lambda x: torch.full_like(x, 255),
        r"experts\.gate_up_proj_scales has values that are not finite",
    ),
    "too few dimensions": (
        "down_proj_blocks",
        lambda x: x.flatten(2),
        r"down_proj_blocks has the shape \[6, 64, 48\]",
    ),
    "too few experts": (
        "down_proj_bias",
        lambda x: x[:5].contiguous(),
        r"down_proj_bias has the shape \[5, 64\], but it must have 2 dimensions and 6 experts",
    ),
    "experts without end": (
        "gate_up_proj_blocks",
        lambda x: torch.empty(1 << 40, 0, 2, 16, dtype=x.dtype),
        r"gate_up_proj_blocks has the shape \[1099511627776, 0, 2, 16\]",
    ),
    "another width": (
        "down_proj_blocks",
        lambda x: x[:, :, :2].contiguous(),
        r"experts\.0\.down_proj\.blocks has the shape \[64, 2, 16\]",
    ),
}


@pytest.mark.parametrize(("name", "change", "words"), SPOILED.values(), ids=SPOILED)
def test_spoiled_tensors_are_refused(folders, name, change, words):
    change_tensor(folders[0], f"{EXPERTS.format(0)}.{name}", change)
    with pytest.raises(ConfigError, match=words):
        load_decoder(folders[0], "fp32", reference)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swiglu_alpha": 1.5}, r"swiglu_alpha = 1\.5 is not supported, only 1\.702"),
        (
            {"architectures": ["LlamaForCausalLM"], "quantization_config": MXFP4},
            "quant_method = 'mxfp4' is supported only for gpt-oss",
        ),
        ({"swiglu_limit": None}, "swiglu_limit = None must be a number"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh' is not supported"),
    ],
)
def test_what_no_code_computes_is_refused(folders, changes, words):
    change_config(folders[1], **changes)
    with pytest.raises(ConfigError, match=words):
        load_config(folders[1])


def test_it_is_not_written_rounded(folders, tmp_path, capsys):
    command = ["quantize", str(folders[1]), str(tmp_path / "target"), "--to", "w8"]
    assert cli.main(command) == 1
    assert "Set model.quantize when you serve" in capsys.readouterr().err
    assert not (tmp_path / "target").exists()
