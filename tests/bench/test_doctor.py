"""`specserve doctor`: what it measures, and what it advises."""

import pytest
import torch

from specserve.config import load_config
from specserve.models.loader import load_decoder
from specserve_bench import doctor
from specserve_bench.bound import StepSize, cost, kv_token_bytes
from specserve_bench.doctor import BF16, DoctorStep, Findings, advice, main
from specserve_kernels import cpu
from tests.checkpoints import tiny_checkpoint
from tests.models import gguf_files
from tests.models.eagle_heads import write_head


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("sick"), max_position_embeddings=1024)


def test_it_reports_of_machine_steps_and_bits(folder, capsys):
    assert main([str(folder), "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = {line[:10].strip(): line[11:] for line in lines}
    for rows in doctor.ROWS:
        assert "ms, " in told["1 row" if rows == 1 else f"{rows} rows"]
    assert "times one row; " in told["64 rows"] and "at least" in told["64 rows"]
    assert told["1 row"].split(" ms, ")[1].startswith("1.00 times")
    assert "CPUs on" in told["CPU"] and "GB/s" in told["memory"] and "TFLOP/s" in told["compute"]
    assert told["batch"].endswith("yes")
    assert any(line.startswith("to change") and "--draft-model" in line for line in lines)


def test_it_reports_of_a_head(tmp_path, capsys):
    target = tiny_checkpoint(tmp_path / "target", num_hidden_layers=4)
    write_head(tmp_path / "head")
    given = tmp_path / "given.toml"
    given.write_text('[memory]\nkv_dtype = "int8"\n')
    head = ["--draft-head", str(tmp_path / "head")]
    main([str(target), *head, "--rounds", "1", "--config", str(given)])
    told = {line[:10].strip(): line[11:] for line in capsys.readouterr().out.splitlines()}
    assert told["KV"] == "0.4 KiB per token of context, 0.1 of them the head's"
    assert "layers 1, 2, 3" in told["head"]


def test_it_reports_of_recurrent_states(tmp_path, capsys):
    folder = tiny_checkpoint(tmp_path / "target", "falcon_h1", max_position_embeddings=1024)
    given = tmp_path / "given.toml"
    given.write_text("[memory]\nkv_bytes = 4194304\nstate_interval = 64\n")
    main([str(folder), "--rounds", "1", "--config", str(given)])
    told = {line[:10].strip(): line[11:] for line in capsys.readouterr().out.splitlines()}
    assert told["state"] == (
        "16.0 KiB per request and per checkpoint, of which the pool has room for 256; "
        "a checkpoint every 64 tokens of a prompt"
    )
    assert told["KV"] == "0.5 KiB per token of context"  # in float32
    assert told["batch"].endswith("yes")


def test_kv_is_of_the_layers_with_attention(tmp_path):
    config = load_decoder(tiny_checkpoint(tmp_path, "bamba"), "fp32", cpu).config
    assert kv_token_bytes(config) == 2 * 1 * 2 * 16 * 2  # one of three layers


def test_without_a_compiler_it_says_so(folder, capsys, monkeypatch):
    def fail():
        raise doctor.BuildError("none")

    monkeypatch.setattr(doctor, "Bound", fail)
    main([str(folder), "--rounds", "1"])
    out = capsys.readouterr().out
    assert doctor.NO_COMPILER in out and "at least" not in out


def test_kernels_whose_rows_differ_are_reported(folder, capsys, monkeypatch):
    run = doctor.ChainSteps.run
    monkeypatch.setattr(
        doctor.ChainSteps,
        "run",
        lambda self, rows: (
            torch.nextafter(run(self, rows), torch.tensor(9.0)) if rows == 33 else run(self, rows)
        ),
    )
    main([str(folder), "--rounds", "1"])
    out = capsys.readouterr().out
    assert "of a step: NO" in out and "break the promise" in out


QUIET = {
    "config": load_config(None, {"model.path": "m", "drafter.model": "d", "model.quantize": "w4"}),
    "steps": [DoctorStep(1, 0.02, 0.018, "reading")],
    "agree": True,
    "slowdown": 1.0,
    "sources": ("ngram", "model"),
    "flags": BF16,
    "is_native": True,
    "is_gpu": False,
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"agree": False}, "break the promise"),
        ({"is_native": False}, "install g++"),
        ({"slowdown": 2.0}, "2.0 times as long"),
        ({"steps": [DoctorStep(1, 0.05, 0.018, "reading")]}, "other load"),
        ({"config": load_config(None, {"model.path": "m", "drafter.model": "d"})}, "--quantize w4"),
        (
            {
                "config": load_config(None, {"model.path": "m", "model.quantize": "w4"}),
                "sources": ("ngram",),
            },
            "--draft-model",
        ),
        ({"steps": [DoctorStep(1, 5e-4, 4e-4, "reading")]}, "planning takes about as long"),
        (
            {"steps": [DoctorStep(1, 5e-4, 4e-4, "reading")], "sources": ("ngram", "eagle")},
            "--drafter eagle, model, ngram and none",
        ),
        ({"flags": frozenset()}, "AVX512-BF16"),
        ({"num_nodes": 2}, "--tensor-parallel-size 2"),
    ],
)
def test_each_finding_has_its_advice(changed, words):
    assert advice(Findings(**QUIET)) == []
    [line] = advice(Findings(**QUIET | changed))
    assert words in line


def test_a_model_that_caches_hold_is_not_reported_to_be_rounded():
    config = load_config(None, {"model.path": "m", "drafter.model": "d"})
    held = DoctorStep(1, 0.004, 0.009, "reading")
    assert advice(Findings(**QUIET | {"config": config, "steps": [held]})) == []
    assert "caches hold it" in doctor.step_words(held, held)
    assert "1.1 times that" in doctor.step_words(QUIET["steps"][0], held)


def test_a_quantized_checkpoint_is_not_reported_to_be_rounded_again():
    config = load_config(None, {"model.path": "m", "drafter.model": "d"})
    assert advice(Findings(**QUIET | {"config": config, "is_quantized": True})) == []


def test_weights_of_a_quantized_checkpoint_have_the_bytes_that_they_take(tmp_path):
    model = load_decoder(gguf_files.write(tmp_path, "llama", **gguf_files.WIDE).file, "bf16", cpu)
    needs = doctor.needs_of(model, StepSize("", (100,), 1), None)
    c, forms = model.config, model.forms
    table = c.vocab_size * c.hidden_size * (forms.embedding_bits or 16) / 8
    assert needs.num_bytes == forms.num_bytes - table + 100 * kv_token_bytes(c)
    assert needs.num_bytes < cost(c, StepSize("", (100,), 1)).num_bytes
