"""Measure what limits a model's steps on this machine, and advise what to change."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from specserve import LLM
from specserve.config import Config
from specserve.engine.pool_plan import size_words
from specserve.engine.runner import Runner, build_step_input
from specserve.errors import ConfigError
from specserve.memory.arena import KVLayout, used_bytes
from specserve.memory.blocks import BlockPool, BlockTable
from specserve.models.decoder import Decoder, LoadedModel
from specserve.models.layouts import kv_layouts
from specserve.models.reader import KV_DTYPES
from specserve.models.shard import WHOLE
from specserve_bench.arguments import at_least_1
from specserve_bench.bound import Bound, Cost, Rates, StepSize, cost, kv_token_bytes
from specserve_bench.figures.steps import chain, typical
from specserve_bench.machine import cpu_name
from specserve_drafters.base import EAGLE
from specserve_kernels.cpu.compiler import BuildError
from specserve_kernels.cpu.levels import AMX, BF16, usable_flags
from specserve_kernels.threads import numa_nodes, topology

CONTEXT = 256
ROWS = (1, 2, 4, 8, 16, 32, 64)
AGREEING = (1, 2, 17, 33, 64)  # rows whose first ones have to have the same bits
FAR = 1.5  # times what reading or multiplying takes: then something else takes the time
NO_COMPILER = "not measured: there is no C++ compiler"


class DoctorStep(NamedTuple):
    rows: int
    seconds: float
    bound: float  # seconds that reading and multiplying take at least; 0 where not measured
    by: str  # which of the two takes longer


class Findings(NamedTuple):
    """The findings that the advice depends on."""

    config: Config
    steps: list[DoctorStep]
    agree: bool
    slowdown: float
    sources: Sequence[str]
    flags: frozenset[str]
    is_native: bool
    is_gpu: bool
    is_quantized: bool = False  # the checkpoint
    num_nodes: int = 1  # NUMA nodes


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    with LLM(
        args.model,
        draft_model=args.draft_model,
        draft_head=args.draft_head,
        drafter=args.drafter,
        quantize=args.quantize,
        config=args.config,
        progress=False,
    ) as llm:
        for title, words in report(llm, args.rounds):
            print(f"{title:<10} {words}", flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="specserve doctor", description=__doc__)
    p.add_argument(
        "model", nargs="?", help="local folder, .gguf file or hub id; default: the demo models"
    )
    p.add_argument("--draft-model", help="draft model, as in specserve serve")
    p.add_argument("--draft-head", help="draft head, as in specserve serve")
    p.add_argument("--drafter", help="drafter, as in specserve serve")
    p.add_argument("--quantize", metavar="w8a8|w8|w4", help="as in specserve serve")
    p.add_argument("--config", type=Path, action="append", metavar="FILE")
    p.add_argument(
        "--rounds", type=at_least_1, default=5, help="rounds per measurement; default: 5"
    )
    return p


def report(llm: LLM, rounds: int) -> Iterator[tuple[str, str]]:
    config, target = llm.config, llm.engine.target
    shape, is_gpu = target.decoder.config, target.arena.blocks.device.type != "cpu"
    flags, machine = usable_flags(), topology()
    yield "CPU", f"{cpu_name()}, {machine.cpus} CPUs on {machine.cores} cores; {units(flags)}"
    if (num_nodes := len(numa_nodes())) > 1:
        yield (
            "NUMA",
            f"{num_nodes} nodes; {config.parallel.size} rank{'s' * (config.parallel.size > 1)}",
        )
    for name, words in llm.loaded.phases.items():
        if name in ("kernels", "target", "draft model", "head", "pool") or name.endswith("threads"):
            yield name, words
    rates = None
    if not is_gpu:
        with suppress(BuildError):
            rates = Bound().rates()
    if rates is not None:
        yield "memory", f"{rates.read / 1e9:.1f} GB/s read"
        yield "compute", f"{rates.multiply / 1e12:.2f} TFLOP/s"
    else:
        yield "memory", "not measured on a GPU" if is_gpu else NO_COMPILER
    head = None if llm.engine.head is None else llm.engine.head.runner
    yield "KV", kv_words(config, target, head)
    if target.arena.state_size:
        yield "state", state_words(config, target.arena.state_size, llm.engine.pool)
    rows = ChainSteps(target, llm.engine.pool)
    steps = [timed(rows, n, rates, config, rounds) for n in ROWS]
    for step in steps:
        yield f"{step.rows} row{'s' * (step.rows > 1)}", step_words(step, steps[0])
    agree = rows.agree()
    yield "batch", f"results do not depend on the other rows of a step: {'yes' if agree else 'NO'}"
    state = llm.speculation()
    slowdown = max((c.slowdown for c in state.costs.values()), default=1.0)
    is_native = "reference" not in llm.loaded.phases.get("kernels", "")
    known = config, steps, agree, slowdown, state.sources, flags, is_native, is_gpu
    found = Findings(*known, shape.quantization is not None, num_nodes)
    for line in advice(found) or ["nothing: this is as fast as it gets here"]:
        yield "to change", line


def kv_words(config: Config, target: Runner, head: Runner | None) -> str:
    """Words about KV bytes in the target's blocks, which hold the head's KV too."""
    dtype, size = KV_DTYPES.get(config.memory.kv_dtype), target.kv.block_size
    number, of_head = (
        0 if runner is None else used_bytes(whole_layouts(runner.decoder, dtype), size) / size
        for runner in (target, head)
    )
    words = f"{(number + of_head) / 1024:.1f} KiB per token of context"
    return f"{words}, {of_head / 1024:.1f} of them the head's" if of_head else words


def whole_layouts(model: LoadedModel, dtype: torch.dtype | None) -> tuple[KVLayout, ...]:
    """The layouts of a model's KV in all ranks. Without `dtype`, KV has the model's dtype."""
    if isinstance(model, Decoder):
        return kv_layouts(model.config, WHOLE, dtype or model.dtype)
    return model.kv_layouts(dtype)


def state_words(config: Config, size: int, pool: BlockPool) -> str:
    """Words about the recurrent state of a request, which takes `size` blocks."""
    every, number = config.memory.state_interval, pool.num_blocks // size
    words = (
        f"{size_words(size * pool.block_bytes)} per request and per checkpoint, of which the pool "
        f"has room for {number}"
    )
    return f"{words}; a checkpoint every {every} tokens of a prompt" if every else words


def units(flags: frozenset[str]) -> str:
    if flags >= AMX:
        return "AMX and AVX512-BF16"
    if flags >= BF16:
        return "AVX512-BF16, no AMX"
    return "AVX512 without BF16" if "avx512f" in flags else "no AVX512"


class ChainSteps:
    """Steps of some rows after CONTEXT tokens of one request."""

    def __init__(self, runner: Runner, pool: BlockPool) -> None:
        self.runner, self.pool = runner, pool
        self.table = BlockTable(pool, runner.kv.block_size)
        positions = min(runner.decoder.num_positions, pool.num_blocks * self.table.block_size)
        if not self.table.try_reserve(min(CONTEXT + ROWS[-1], positions)):
            raise ConfigError("The pool has no room for a step of 64 rows. Raise memory.kv_bytes.")
        self.start = max(0, min(CONTEXT, positions - ROWS[-1]))

    @torch.inference_mode()
    def run(self, rows: int) -> torch.Tensor:
        """The logits of a root and a chain of draft tokens. Shape [rows, V]."""
        group = chain(self.table, self.start, rows)
        return self.runner.launch(build_step_input([group], self.pool.updates)).logits

    def agree(self) -> bool:
        """Whether a row has the same bits, however many others are in its step."""
        all_rows = self.run(AGREEING[-1]).clone()
        return all(torch.equal(self.run(n), all_rows[:n]) for n in AGREEING)


def timed(
    rows: ChainSteps, num: int, rates: Rates | None, config: Config, rounds: int
) -> DoctorStep:
    run = partial(rows.run, num)
    for _ in range(20):
        run()
    seconds = min(typical(run) for _ in range(rounds))
    if rates is None:
        return DoctorStep(num, seconds, 0.0, "")
    needs = needs_of(rows.runner.decoder, StepSize("", (CONTEXT,), num), config.model.quantize)
    reading, multiplying = needs.num_bytes / rates.read, needs.flops / rates.multiply
    by = "reading" if reading > multiplying else "multiplying"
    return DoctorStep(num, seconds, max(reading, multiplying), by)


def needs_of(model: LoadedModel, size: StepSize, quantize: str | None) -> Cost:
    """As `cost`, but the weights of a quantized checkpoint have the bytes that they take."""
    needs, c, forms = cost(model.config, size, quantize), model.config, model.forms
    if c.quantization is None:
        return needs
    table = c.vocab_size * c.hidden_size * (forms.embedding_bits or 16) / 8  # few rows are read
    weights = forms.num_bytes - table
    return needs._replace(num_bytes=weights + sum(size.contexts) * kv_token_bytes(c))


def step_words(step: DoctorStep, first: DoctorStep) -> str:
    words = f"{1e3 * step.seconds:.2f} ms, {step.seconds / first.seconds:.2f} times one row"
    if step.bound:
        over = step.seconds / step.bound
        is_cached = step.by == "reading" and over < 1
        told = "less: caches hold it" if is_cached else f"{over:.1f} times that"
        words += f"; {step.by} takes {1e3 * step.bound:.2f} ms at least ({told})"
    return words


def advice(found: Findings) -> list[str]:
    """Advice for faster responses, the most important first."""
    first, config = found.steps[0], found.config
    lines: list[str] = []
    if not found.agree:
        lines.append("the kernels break the promise on this machine: please report it")
    if not found.is_native and not found.is_gpu:
        lines.append("install g++ 11 or later: without it the slow reference kernels run")
    if found.slowdown > 1.3:  # times the time of a quiet machine
        lines.append(
            f"other processes take the CPU: steps take {found.slowdown:.1f} times as long as they "
            "did; give the server cores of its own"
        )
    if first.bound and first.seconds > FAR * first.bound and first.seconds > 5e-3:
        lines.append(
            "A step takes far longer than reading its bytes. Look for other load, and check "
            "model.threads."
        )
    is_of_bytes = first.by == "reading" and 1 <= first.seconds / first.bound < FAR
    if is_of_bytes and config.model.quantize is None and not found.is_quantized:
        lines.append(
            "Steps take as long as reading the weights. --quantize w4 about halves their time."
        )
    if is_of_bytes and config.parallel.size < found.num_nodes and not found.is_gpu:
        lines.append(
            f"This machine has {found.num_nodes} NUMA nodes. With --tensor-parallel-size "
            f"{found.num_nodes}, each reads a part of the weights from its own memory."
        )
    if config.draft is None and "model" not in found.sources:
        lines.append("Name a draft model of the target model's family with --draft-model.")
    if first.seconds < 1e-3:
        drafters = "eagle, model, ngram" if EAGLE in found.sources else "model, ngram"
        lines.append(
            "Steps are so short that planning takes about as long as drafting saves. "
            f"Compare --drafter {drafters} and none with specserve bench drafters."
        )
    if found.flags < BF16 and not found.is_gpu:
        lines.append("A CPU with AVX512-BF16 or AMX multiplies several times as fast.")
    return lines
