"""`specserve quantize`: what it writes is what loading with `model.quantize` makes."""

import json
import os
import signal
import stat

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from specserve.api.poolers import find_poolers
from specserve.cli import command as cli
from specserve.models import writing
from specserve.models.loader import load_decoder
from specserve.models.weight import AS_STORED, Rounding
from specserve.process import ENDING
from specserve.text.tokenizer import load_tokenizer
from specserve_kernels import reference
from tests.checkpoints import tiny_checkpoint
from tests.models.forward import logits, prompt

TO = {  # flags -> what they mean at load
    "w4": (["--to", "w4"], Rounding(4, 8)),
    "w8": (["--to", "w8"], Rounding(8, 8)),
    "w8a8": (["--to", "w8a8"], Rounding(8, 8, True)),
    "w8a8, layers alone": (["--to", "w8a8", "--head", "none"], Rounding(8, None, True)),
    "layers alone": (["--to", "w4", "--head", "none"], Rounding(4, None)),
    "all in 4 bits": (["--to", "w4", "--head", "w4"], Rounding(4, 4)),
}
FAMILIES = {
    "qwen3": {},
    "tied": {"tie_word_embeddings": True},
    "odd widths": {"hidden_size": 72, "intermediate_size": 102},
}


def quantize(source, target, *flags):
    assert cli.main(["quantize", str(source), str(target), *flags]) == 0
    return target


def load(folder, rounding=AS_STORED):
    return load_decoder(folder, "auto", reference, rounding=rounding)


FUSED = {"family": "phi3", "partial_rotary_factor": 0.75}


EXPERTS = {"family": "qwen3_moe", "moe_intermediate_size": 64}
OTHERS = {"fused maps": FUSED, "experts": EXPERTS, "odd experts": {"family": "qwen3_moe"}}


@pytest.mark.parametrize("sizes", [*FAMILIES.values(), *OTHERS.values()], ids=[*FAMILIES, *OTHERS])
@pytest.mark.parametrize(("flags", "rounding"), TO.values(), ids=TO)
def test_loading_it_gives_the_bits_of_rounding_at_load(tmp_path, flags, rounding, sizes):
    source = tiny_checkpoint(tmp_path / "source", dtype=torch.bfloat16, **sizes)
    target, ids = quantize(source, tmp_path / "target", *flags), prompt(320, 37)
    written, rounded = load(target), load(source, rounding)
    assert torch.equal(logits(written, ids), logits(rounded, ids))
    assert written.weights.forms.maps == rounded.weights.forms.maps


@pytest.mark.parametrize("flags", [["--to", "w4"], ["--to", "w8a8"]], ids=["w4", "w8a8"])
def test_the_head_of_a_classifier_is_not_rounded(tmp_path, flags):
    kind = AutoModelForSequenceClassification
    source = tiny_checkpoint(tmp_path / "source", kind=kind, num_labels=2)
    target = quantize(source, tmp_path / "target", *flags)
    stored = load_file(source / "model.safetensors")["score.weight"]
    assert torch.equal(load(target).score, stored)


def test_the_modules_of_an_embedder_are_copied(tmp_path):
    source = tiny_checkpoint(tmp_path / "source", kind=AutoModel)
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_bytes(b"weights")
    target = quantize(source, tmp_path / "target", "--to", "w8")
    read = load_tokenizer(target)
    assert find_poolers(target, "auto", read, "native").embedder.pooling.kind == "mean"
    assert not (target / "onnx").exists()
    assert (target / "1_Pooling").stat().st_mode & 0o100


def test_routers_are_not_rounded(tmp_path):
    source = tiny_checkpoint(tmp_path / "source", **EXPERTS)
    target = quantize(source, tmp_path / "target", "--to", "w8a8")
    stored = load_file(target / "model.safetensors")
    router = "model.layers.1.mlp.gate"
    assert torch.equal(
        stored[f"{router}.weight"], load_file(source / "model.safetensors")[f"{router}.weight"]
    )
    assert stored["model.layers.1.mlp.experts.7.down_proj.weight"].dtype == torch.int8
    told = json.loads((target / "config.json").read_text())["quantization_config"]
    assert router in told["ignore"]


@pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("flags", [flags for flags, _ in TO.values()], ids=TO)
def test_compressed_tensors_reads_the_same_weights(tmp_path, flags, sizes):
    """Through transformers, which has it decompress them; rows it rounds by other scales."""
    source = tiny_checkpoint(tmp_path / "source", **sizes)
    target, ids = quantize(source, tmp_path / "target", *flags), prompt(320, 37)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert hasattr(model.model.layers[0].mlp.up_proj, "weight_scale")
    with torch.no_grad():
        got, want = model(ids[None]).logits[0], logits(load(target), ids)
    if "w8a8" in flags:
        assert (got - want).norm() < 0.06 * want.norm()
    else:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_all_else_is_copied_and_readable(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")
    target = quantize(source, tmp_path / "target", "--to", "w4")
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in target.iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()}
    assert modes == {stat.S_IMODE((target / "config.json").stat().st_mode)}
    told = json.loads((target / "config.json").read_text())
    assert told.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert told == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--to", "w4"], "maps in 4 bits, head in 8 bits"),
        (["--to=w8a8", "--head=none"], "maps in 8 bits with activations in 8, head not quantized"),
    ],
)
def test_the_last_line_reports_the_bits(tmp_path, capsys, flags, words):
    target = quantize(tiny_checkpoint(tmp_path / "source"), tmp_path / "target", *flags)
    assert capsys.readouterr().out == f"{target}: 0 MiB of weights: {words}\n"


def test_no_other_weights_are_copied(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")
    for name in ("pytorch_model.bin", "model.gguf", "model.safetensors.index.json", "notes.txt"):
        (source / name).write_text("old")
    target = quantize(source, tmp_path / "target", "--to", "w4")
    assert {path.name for path in source.iterdir()} - {path.name for path in target.iterdir()} == {
        "pytorch_model.bin",
        "model.gguf",
        "model.safetensors.index.json",
    }


def test_a_link_to_nowhere_is_not_written_over(tmp_path, capsys):
    source, target = tiny_checkpoint(tmp_path / "source"), tmp_path / "target"
    target.symlink_to(tmp_path / "nowhere")
    assert cli.main(["quantize", str(source), str(target), "--to", "w4"]) == 1
    assert "target exists. Remove it" in capsys.readouterr().err


@pytest.mark.parametrize("head", ["none", "w8", "w4"])
def test_a_map_has_the_format_that_the_library_has_for_it(tmp_path, head):
    """Where all have the same one, older versions need no other word than that of all."""
    source = tiny_checkpoint(tmp_path / "source")
    target = quantize(source, tmp_path / "target", "--to", "w8a8", "--head", head)
    told = json.loads((target / "config.json").read_text())["quantization_config"]
    own, *others = told["config_groups"].values()
    assert own["input_activations"]["strategy"] == "token"
    assert all("input_activations" not in group for group in others)
    formats = [group.get("format") for group in (own, *others)]
    if head == "none":
        assert (told["format"], formats) == ("int-quantized", [None])
    else:
        assert told["format"] == "mixed-precision"
        assert formats == ["int-quantized", "pack-quantized"]


TARGETS = {  # flags -> which maps have which bits, and which are left
    "w4": ([["Linear"], ["lm_head"]], [4, 8], []),
    "w8": ([["Linear", "lm_head"]], [8], []),
    "w8a8": ([["Linear"], ["lm_head"]], [8, 8], []),
    "layers alone": ([["Linear"]], [4], ["lm_head"]),
    "all in 4 bits": ([["Linear", "lm_head"]], [4], []),
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_head_is_named_as_others_take_it_for_no_linear_map(tmp_path, name):
    """vLLM does."""
    source = tiny_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    target = quantize(source, tmp_path / "target", *TO[name][0])
    told = json.loads((target / "config.json").read_text())["quantization_config"]
    groups = told["config_groups"].values()
    targets, bits, ignored = TARGETS[name]
    assert [group["targets"] for group in groups] == targets
    assert [group["weights"]["num_bits"] for group in groups] == bits
    assert told["ignore"] == ignored


def test_a_large_model_is_written_in_shards(tmp_path, monkeypatch):
    source = tiny_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    whole = load_file(quantize(source, tmp_path / "whole", "--to", "w4") / "model.safetensors")
    monkeypatch.setattr(writing, "SHARD_BYTES", 20_000)
    target = quantize(source, tmp_path / "target", "--to", "w4")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert len(set(index["weight_map"].values())) > 2
    got, want = (logits(load(f), prompt(320, 30)) for f in (target, tmp_path / "whole"))
    assert torch.equal(got, want)


REFUSED = {  # source, target -> words of the complaint
    "a target that exists": ("source", "source", "source exists. Remove it, or name another"),
    "a target in the source": ("source", "source/x", "is inside the source folder. Name another"),
    "no folder for it": ("source", "no/target", "does not exist. Create it"),
    "no source": ("./nowhere", "target", "no such folder"),
    "a quantized source": ("quantized", "target", "quantized already (compressed-tensors)"),
    "a GGUF file to write": ("source", "out.gguf", "quantize cannot write GGUF files. Name"),
    "a number that is none": ("broken", "target", "lm_head.weight has values that are not finite"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    quantize(tiny_checkpoint(folder / "source"), folder / "quantized", "--to", "w4")
    weights = tiny_checkpoint(folder / "broken") / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"][7, 7] = torch.inf
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("source", "target", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_written_is_one_line(models, capsys, source, target, words):
    there = sorted(models.iterdir())
    path = source if source.startswith(".") else str(models / source)
    assert cli.main(["quantize", path, str(models / target), "--to", "w4"]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert sorted(models.iterdir()) == there


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")]
)
def test_what_fails_on_the_way_leaves_nothing(tmp_path, monkeypatch, capsys, error):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(writing, "save_file", full)
    source = tiny_checkpoint(tmp_path / "source")
    assert cli.main(["quantize", str(source), str(tmp_path / "target"), "--to", "w8"]) == 1
    assert (
        "target: cannot be written (No space left on device). Free some space"
        in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.fixture
def heeded():
    """No signal is ignored, as SIGHUP is below nohup: the command would leave it so."""
    before = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        if before[number] is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", ENDING)
def test_signals_on_the_way_leave_nothing(tmp_path, monkeypatch, number):
    """Others come while what is half written is removed."""

    def save_file(tensors, file, metadata):
        file.write_bytes(b"half")
        assert callable(signal.getsignal(number)), "it would end the tests, too"
        signal.raise_signal(number)

    def unlink(*args, **kwargs):
        for each in ENDING:
            signal.raise_signal(each)
        real(*args, **kwargs)

    real = os.unlink
    monkeypatch.setattr(writing, "save_file", save_file)
    source = tiny_checkpoint(tmp_path / "source")
    before = [signal.getsignal(n) for n in ENDING]
    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as e:
        code = cli.main(["quantize", str(source), str(tmp_path / "target"), "--to", "w8"])
        raise SystemExit(code)
    assert [signal.getsignal(n) for n in ENDING] == before
    assert e.value.code == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
