"""Steps against their bound: what a step costs at least, and the loops that measure the CPU."""

import math

import numpy as np
import pytest
import torch

from specserve.models import tensor_shapes
from specserve_bench import bound
from specserve_bench.bound import Bound, Cost, Rates, StepSize, compiled, cost
from specserve_bench.demo.scaled_model import shape_config
from specserve_bench.figures import steps
from specserve_bench.figures.steps import table_lengths
from tests.checkpoints import tiny_checkpoint

SMALL = (
    StepSize("1 row", (20,), 1),
    StepSize("4 rows", (20,), 4),
    StepSize("2 requests", (20, 30), 1),
)


@pytest.fixture(scope="module")
def library():
    return compiled()


def num_weights(config):
    """That a step without a context reads."""
    return cost(config, StepSize("", (0,), 1)).num_bytes / 2


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.1-8b"])
def test_the_weights_are_those_of_the_maps_and_of_one_head(shape):
    config = shape_config(shape)
    matrices = [s for s in tensor_shapes.tensor_shapes(config).values() if len(s) == 2]
    embedding = 0 if config.tied else config.vocab_size * config.hidden_size
    assert num_weights(config) == sum(map(math.prod, matrices)) - embedding


def test_a_step_reads_its_weights_once_and_each_context_once():
    config = shape_config("qwen3-0.6b")
    one, four = (cost(config, StepSize("", (512,), rows)) for rows in (1, 4))
    assert one.num_bytes == four.num_bytes == 2 * 595_984_384 + 512 * 114_688
    assert four.flops == 4 * one.flops == 4 * (2 * 595_984_384 + 4 * 28 * 16 * 128 * 512)


def test_quantized_weights_are_fewer_bytes_and_as_many_operations():
    config = shape_config("qwen3-0.6b")
    size, head = StepSize("", (512,), 1), config.vocab_size * config.hidden_size
    full, half, quarter = (cost(config, size, to) for to in (None, "w8", "w4"))
    assert full.num_bytes - half.num_bytes == 595_984_384
    assert half.num_bytes - quarter.num_bytes == (595_984_384 - head) * (1 - 4.5 / 8)
    assert full.flops == half.flops == quarter.flops


def test_requests_add_their_contexts():
    config = shape_config("qwen3-0.6b")
    both = cost(config, StepSize("", (300, 400), 1))
    apart = [cost(config, StepSize("", (context,), 1)) for context in (300, 400)]
    weights = 2 * num_weights(config)
    assert both.num_bytes + weights == sum(c.num_bytes for c in apart)
    assert both.flops == sum(c.flops for c in apart)


def test_the_bound_is_the_longer_of_reading_and_multiplying():
    rates = Rates(read=10.0, multiply=100.0)
    assert rates.seconds(*Cost(num_bytes=50, flops=100)) == 5
    assert rates.seconds(*Cost(num_bytes=50, flops=1000)) == 10


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_loop_reads_all_of_the_memory(library, threads):
    memory = np.random.default_rng(0).integers(0, 2**63, 3 * (1 << 12), np.uint64)
    found = library.bound_read(memory.ctypes.data, memory.nbytes, threads)
    assert found == np.bitwise_xor.reduce(memory)


def test_the_loop_counts_what_it_multiplies(library):
    flops = [
        library.bound_multiply(turns, threads) for turns, threads in ((10, 1), (30, 1), (10, 2))
    ]
    assert flops[0] > 0
    assert flops == [flops[0], 3 * flops[0], 2 * flops[0]]


def test_more_turns_take_longer(library):
    """Else the compiler has dropped the loop, and the peak would be without limit."""
    loops = object.__new__(Bound)
    loops.library = library
    times = []
    for loops.turns in (1 << 10, 1 << 18):
        times.append(min(loops.multiply(1)[1] for _ in range(5)))
    assert times[1] > 50 * times[0]


def test_a_table_holds_the_longest_of_its_contexts():
    assert table_lengths(SMALL) == [24, 31]


def test_every_size_is_measured_in_every_round(tmp_path, monkeypatch):
    monkeypatch.setattr(bound, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(bound, "MULTIPLY_SECONDS", 0.001)
    # Of a machine that nothing slows down at one moment: no step of a tiny model is as fast.
    monkeypatch.setattr(bound.Bound, "rates", lambda self: Rates(read=1e11, multiply=1e13))
    folder = tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    ran = []
    run = steps.Steps.run
    monkeypatch.setattr(steps.Steps, "run", lambda self, size: ran.append(size) or run(self, size))
    result = steps.measure(folder, SMALL, rounds=3)
    assert [ran[i] for i in range(60, len(ran), 5)] == [*SMALL] * 3
    assert [s["step"] for s in result["steps"]] == ["1 row", "4 rows", "2 requests"]
    for each in result["steps"]:
        ratio = each["over_bound"]
        assert 1 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert result["steps"][0]["over_first"] == {"median": 1, "low": 1, "high": 1}
    assert "| 2 requests |" in steps.table(result)


def test_a_compiler_that_fails_says_what_is_wrong(tmp_path, monkeypatch):
    source = tmp_path / "bound.cpp"
    source.write_text("no C++")
    monkeypatch.setattr(bound, "SOURCE", source)
    with pytest.raises(bound.BuildError, match=r"could not compile bound\.cpp"):
        compiled()


def test_the_loops_say_what_they_multiply_with(library):
    assert library.bound_unit() in (b"AMX tiles", b"vdpbf16ps", b"bfmmla", b"fp32 multiply-add")
