"""Figures of mixtures, quantized weights, recurrent layers and transformers' modules."""

import operator
from functools import partial

import pytest
import torch

from specserve.models import parse_config
from specserve_bench import bound, pairs
from specserve_bench.bound import Rates, StepSize
from specserve_bench.figures import implementations, mixtures, quantized, recurrent, steps
from specserve_bench.figures.implementations import EAGER, NAMES
from specserve_bench.figures.mixtures import active_bytes
from specserve_bench.pairs import EXPERTS
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock
from tests.models import gguf_files

SIZES = [StepSize("1 row", (99,), 1), StepSize("3 rows", (40,), 3)]


def test_a_row_reads_its_own_experts_the_router_attention_the_head_and_kv():
    shape = EXPERTS | {"num_hidden_layers": 1, "vocab_size": 7}
    attention, experts, router = 6 * 1024 * 1024, 8 * 3 * 512 * 1024, 64 * 1024
    weights = attention + experts + router + 7 * 1024
    kv = 5 * 2 * 8 * 128
    assert active_bytes(parse_config.parse(shape), StepSize("", (5,), 1)) == 2 * (weights + kv)


def test_a_mixture_is_measured_against_what_one_row_reads(monkeypatch):
    monkeypatch.setattr(bound, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(bound, "MULTIPLY_SECONDS", 0.001)
    monkeypatch.setattr(bound.Bound, "rates", lambda self: Rates(read=1e12, multiply=1e13))
    small = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 320}
    small |= {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
    result = mixtures.measure(EXPERTS | small, SIZES, rounds=2)
    assert [s["step"] for s in result["steps"]] == ["1 row", "3 rows"]
    assert result["steps"][0]["over_first"] == {"median": 1, "low": 1, "high": 1}
    assert result["over_reading"]["low"] > 1
    assert "| 3 rows |" in mixtures.table(result)


def test_implementations_are_measured_next_to_native_code_op_by_op(tmp_path):
    folder = tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    result = implementations.measure(folder, SIZES, rounds=2)
    for step in result["steps"]:
        assert {*step} == {"step", *NAMES}
        assert step[EAGER]["over_eager"] == pytest.approx({"median": 1, "low": 1, "high": 1})
        assert all(step[name]["ms"]["low"] > 0 for name in NAMES)
    assert implementations.table(result).count("\n|") == 3


def test_quantized_weights_are_measured_against_plain_steps_bytes_and_bf16(tmp_path, monkeypatch):
    seconds = partial(operator.mul, 0.25)  # of so many rows
    clock = Clock(monkeypatch, seconds, seconds)
    for module in (steps, recurrent):
        monkeypatch.setattr(module, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(bound, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(bound, "MULTIPLY_SECONDS", 0.001)
    monkeypatch.setattr(bound.Bound, "rates", lambda self: Rates(read=1e9, multiply=1e13))
    folder = tiny_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    file = gguf_files.write(tmp_path).file
    sizes = [StepSize(f"{n} rows at 512", (99,), n) for n in (1, 8)]
    result = quantized.measure(folder, file, [30], sizes, sizes, rounds=2)
    each = [(r["model"], r["case"], r["base"], r["over"]["median"]) for r in result["rows"]]
    reading = quantized.stored_bytes(quantized.read_header(file)) + 99 * 256  # and KV
    assert each == [
        ("w4", "1 rows at 512", "1 rows at 512", 1),
        ("w4", "8 rows at 512", "1 rows at 512", 8),
        ("w4", "prompt of 30 tokens", "bf16", 1),
        ("SmolLM2", "1 rows at 512", "1 rows at 512", 1),
        ("SmolLM2", "8 rows at 512", "1 rows at 512", 8),
        ("SmolLM2", "1 rows at 512", "its bytes", pytest.approx(0.25e9 / reading)),
    ]
    assert "| 8.00 (8.00 to 8.00) | 1.6 |" in quantized.table(result)
    assert quantized.table(result).count("\n|") == 5


TINY_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY_SIZES |= {"vocab_size": 320, "block_multiple_of": 32, "intermediate_size": 96}


def test_a_dense_model_has_as_many_linear_weights_as_the_recurrent_one():
    for fields in recurrent.SHAPES.values():
        config = parse_config.parse(fields)
        dense = parse_config.parse(recurrent.dense_fields(config))
        assert dense.num_layers == config.num_layers
        assert dense.num_layer_weights == pytest.approx(config.num_layer_weights, rel=0.01)


def test_recurrent_layers_are_measured_against_bytes_and_a_dense_model(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, target=lambda rows: 0.01 * rows)
    monkeypatch.setattr(recurrent, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(bound, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(bound, "MULTIPLY_SECONDS", 0.001)
    monkeypatch.setattr(bound.Bound, "rates", lambda self: Rates(read=1e12, multiply=1e13))
    monkeypatch.setattr(pairs, "MODELS", tmp_path)
    monkeypatch.setattr(recurrent, "KNOWN", 100)
    tiny = recurrent.SHAPES["lfm2-1.2b"] | TINY_SIZES
    tiny |= {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    result = recurrent.measure({"tiny": tiny}, rounds=2, prompt=40)
    (model,) = result["models"]
    assert model["state_bytes"] > 0 and model["over_bytes"]["low"] > 1
    assert model["second_turn"]["median"] < 1  # a prefix hit
    assert model["rounds"] == 2
    assert recurrent.table(result).count("\n|") == 5


def test_recurrent_layers_have_fewer_rounds_on_a_slow_cpu(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, target=lambda rows: 0.1 * rows)  # 16 s and more for a round
    monkeypatch.setattr(recurrent, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(recurrent, "MODEL_SECONDS", 20)
    monkeypatch.setattr(recurrent, "CONTEXT", 16)
    monkeypatch.setattr(recurrent, "KNOWN", 64)
    monkeypatch.setattr(bound.Bound, "rates", lambda self: Rates(read=1e12, multiply=1e13))
    monkeypatch.setattr(bound, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(bound, "MULTIPLY_SECONDS", 0.001)
    monkeypatch.setattr(pairs, "MODELS", tmp_path)
    tiny = recurrent.SHAPES["lfm2-1.2b"] | TINY_SIZES
    tiny |= {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    result = recurrent.measure({"tiny": tiny}, rounds=5, prompt=40)
    assert result["models"][0]["rounds"] == recurrent.LEAST_ROUNDS == 2
