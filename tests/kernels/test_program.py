"""A recorded forward gives what its ops give one by one, in memory that is reserved beforehand."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specserve_kernels import cpu
from specserve_kernels.cpu import ops as cpu_ops
from specserve_kernels.cpu.recorder import Memory
from specserve_kernels.ops import EagerProgram
from tests.kernels.random_steps import RandomStep, Req, random_tensor

ROOT = Path(__file__).parents[2]
V, WIDTH, LAYERS = 50, 32, 3
STEP = RandomStep([Req(20, 5)], num_layers=LAYERS)


class Small:
    """A model without linear maps; `extra` is one more op after every layer's."""

    def __init__(self, ops, extra=None, num_layers=LAYERS):
        self.ops, self.extra, self.num_layers = ops, extra, num_layers
        self.table, self.weight = random_tensor(V, WIDTH), random_tensor(WIDTH, seed=1).float()

    def on(self, ops):
        return Small(ops, self.extra, self.num_layers)

    def plan(self, rows, kv, also=()):
        return self.ops.plan(rows, kv, STEP.num_heads, [None], also)

    def embed(self, token_ids):
        return self.ops.embed(self.table, token_ids, self.table.dtype)

    def forward(self, x, kv, plan, aux_layer_ids=()):
        for _ in range(self.num_layers):
            x = self.ops.rms_norm(x, self.weight, 1e-6)
            if self.extra is not None:
                x = getattr(self.ops, self.extra)(x)
        return x, {}

    def logits(self, residual, rows):
        return self.ops.rms_norm(self.ops.take_rows(residual, rows), self.weight, 1e-6)


def both(program, eager, ids, read):
    """The outputs of a recorded and an eager run of the same step, which must be equal."""
    ids, read = torch.tensor(ids), torch.tensor(read, dtype=torch.int64)
    rows = STEP.rows()
    want, got = eager.run(rows, ids, read), program.run(rows, ids, read)
    assert torch.equal(got.residual, want.residual)
    if want.logits is None:
        assert got.logits is None
    else:
        assert torch.equal(got.logits, want.logits)
    return got


def test_a_recorded_forward_runs_any_rows():
    program, eager = cpu.program(Small(cpu), STEP.kv, 8, 4), EagerProgram(Small(cpu), STEP.kv)
    for n in (1, 8, 3):
        both(program, eager, range(n), range(n)[-2:])
    names = ["gather", "plan_attention", *["norm"] * LAYERS, "gather", "norm"]
    assert program.native_ops == names
    assert program.host_ops == []


def test_without_rows_to_read_the_head_does_not_run():
    program, eager = cpu.program(Small(cpu), STEP.kv, 8, 4), EagerProgram(Small(cpu), STEP.kv)
    first = both(program, eager, [1, 2], [1]).logits
    before = first.clone()
    both(program, eager, [3, 4], [])
    assert torch.equal(first, before)


def test_logits_of_further_rows_of_the_last_run():
    program, eager = cpu.program(Small(cpu), STEP.kv, 8, 4), EagerProgram(Small(cpu), STEP.kv)
    both(program, eager, range(6), [0, 1])
    further = torch.tensor([3, 5])
    assert torch.equal(program.logits(further), eager.logits(further))


def test_a_step_with_more_rows_than_reserved_is_recorded_anew():
    program, eager = cpu.program(Small(cpu), STEP.kv, 2, 1), EagerProgram(Small(cpu), STEP.kv)
    both(program, eager, range(5), [4])
    both(program, eager, range(5), range(5))
    both(program, eager, [1], [0])


class Reads(Small):
    """Adds the tokens' embeddings to the residual that it begins with."""

    def on(self, ops):
        return Reads(ops)

    def forward(self, x, kv, plan, aux_layer_ids=()):
        embedded = self.embed(plan.also[0])
        return self.ops.rms_norm_add(embedded, self.weight, 1e-6, x), {}


@pytest.mark.parametrize("make", [cpu.program, lambda model, kv, *_: EagerProgram(model, kv)])
def test_a_forward_may_read_token_ids_next_to_its_residual(make):
    model, residual = Reads(cpu), random_tensor(3, WIDTH, seed=2)
    kept, program, read = residual.clone(), make(model, STEP.kv, 8, 4), torch.tensor([2])
    further = [torch.tensor([9])]
    for ids in (torch.tensor([1, 2, 3]), torch.tensor([4, 0, 4])):
        got = program.run(STEP.rows(), ids, read, further, residual)
        want = cpu.rms_norm_add(model.embed(ids), model.weight, 1e-6, residual.clone())
        assert torch.equal(got.residual, want) and torch.equal(residual, kept)
        assert torch.equal(got.logits, model.logits(want, read))
        assert list(got.also) == further


def negate(x):
    return -x


def halve(x):
    return x.mul_(0.5)


@pytest.mark.parametrize("function", [negate, halve], ids=["new result", "in place"])
def test_an_op_without_native_form_is_run_by_python(monkeypatch, function):
    for module in (cpu, cpu_ops):
        monkeypatch.setattr(module, "other", function, raising=False)
    model = Small(cpu, "other")
    program, eager = cpu.program(model, STEP.kv, 8, 4), EagerProgram(model, STEP.kv)
    for n in (1, 7, 2):
        both(program, eager, range(n), [0])
    assert program.host_ops == ["other"] * LAYERS
    assert "3 in Python (other)" in program.words


def test_buffers_are_taken_again_when_nothing_refers_to_them():
    sizes = [
        cpu.program(Small(cpu, num_layers=n), STEP.kv, 64, 64).recording.memory.num_bytes
        for n in (2, 20)
    ]
    assert sizes[0] == sizes[1] <= 4 * 64 * WIDTH * 4


def faults_of_steady_runs():
    program = cpu.program(Small(cpu), STEP.kv, 512, 64)
    rows, ids, read = STEP.rows(), torch.arange(512) % V, torch.arange(64)
    program.run(rows, ids, read)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        program.run(rows, ids, read)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_steady_runs_neither_fault_nor_allocate():
    """In a process of its own: the heap that other tests leave has some faults whatever runs."""
    code = f"from {__name__} import faults_of_steady_runs as f; print(f())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert int(done.stdout) <= 1, done.stderr


def test_a_recording_without_memory_leaves_the_program_as_it_was(monkeypatch):
    program, eager = cpu.program(Small(cpu), STEP.kv, 2, 1), EagerProgram(Small(cpu), STEP.kv)

    def refuse(self, num_bytes):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Memory, "take", refuse)
        with pytest.raises(MemoryError):
            both(program, eager, range(5), [4])
    both(program, eager, [1], [0])
    both(program, eager, range(5), [4])
