"""Choose the number of threads at start-up, run all kernels once, measure steps, and keep their
costs.
"""

from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from specserve.config import Config
from specserve.engine.loading import Model, asked_for, device_refused
from specserve.engine.pool_plan import rows_of_steps
from specserve.engine.runner import RowGroup, Runner, build_step_input
from specserve.errors import ConfigError
from specserve.memory.blocks import BlockPool, BlockTable
from specserve.memory.states import RequestState
from specserve.models.draft_head import DraftHead
from specserve.speculation.constants import KNOWN
from specserve.speculation.costs import KnownCosts, StepCosts
from specserve.version import VERSION
from specserve_drafters.candidates import TREE_SLOTS
from specserve_kernels import DeviceError, SampleParams, Threads
from specserve_kernels.cpu.compiler import cpu_name, source_hash
from specserve_kernels.cpu.kept import keep, kept_file, read_kept
from specserve_kernels.threads import topology

CONTEXT = 256  # tokens before the rows of a step that runs at start-up
MEASURING = 1.5  # most seconds of measuring a model's steps


def tune(
    model: Model,
    runner: Runner,
    pool: BlockPool,
    config: Config,
    max_len: int,
    num_slots: int = 0,
) -> str:
    """Set the runner's threads; return the choice as text. It is made once per model unless the
    config has a number. It runs steps, for every runner if the build records them, also with
    adapters if the model has adapter slots.
    """
    if model.threads is None or config.model.threads is not None or runner.ops.records_steps:
        model.threads = choose_threads(runner, pool, config, max_len, num_slots)
    runner.threads, words = model.threads
    return words


@torch.inference_mode()
def choose_threads(
    runner: Runner, pool: BlockPool, config: Config, max_len: int, num_slots: int = 0
) -> tuple[Threads, str]:
    """Return the choice of the ops' build, which may run steps of up to the largest number of
    rows. ConfigError if requests hold the blocks that it needs.
    """
    table = table_of(runner, pool)
    positions = positions_of(runner, pool, max_len)
    start = max(0, min(CONTEXT, positions - TREE_SLOTS))
    most = min(config.scheduler.max_batched_tokens, positions - start)
    if not table.try_reserve(start + max(most, TREE_SLOTS)):
        raise ConfigError(
            "running requests hold the KV blocks that are needed to prepare the model. Retry "
            "when fewer requests run"
        )

    def step(rows: int) -> Tensor:
        tree = RowGroup(table, [0] * 3, start, 3, start, [0b1, 0b11, 0b101])
        run(runner, [tree], num_slots)
        # On a GPU the first use of a KV move compiles its kernel.
        slot = torch.tensor([table.slot(0)])
        runner.ops.move_kv(runner.kv, slot, slot)
        group = RowGroup(table, [0] * rows, start, num_read=1)
        if num_slots and runner.ops.records_steps:
            run(runner, [group._replace(slot=0)], num_slots)
        return run(runner, [group], num_slots)

    try:
        return runner.ops.tune(step, most, config.model.threads, model_key(runner))
    except ValueError as e:
        raise ConfigError(f"model.threads: {e}") from e
    except DeviceError as e:
        raise device_refused(config, e) from e
    except torch.OutOfMemoryError as e:
        raise ConfigError(
            f"memory for a step of {most} rows is missing after weights and KV pool "
            f"({asked_for(e)}). Lower memory.kv_bytes, memory.kv_fraction or "
            "scheduler.max_batched_tokens"
        ) from e
    finally:
        table.clear()


def table_of(runner: Runner, pool: BlockPool) -> BlockTable:
    """Return an empty table, with a recurrent state if the model has one."""
    return BlockTable(pool, runner.kv.block_size, state=RequestState(runner.state_size))


def positions_of(runner: Runner, pool: BlockPool, max_len: int) -> int:
    """Return the most tokens of a request with its tree. A draft model may have fewer positions."""
    positions = min(max_len + TREE_SLOTS, runner.decoder.num_positions)
    return min(positions, pool.num_blocks * runner.kv.block_size)


def run(runner: Runner, groups: list[RowGroup], num_slots: int = 0) -> Tensor:
    """Run a step of these rows; return its logits. A draft head gets features of zeros."""
    decoder, rows, features = runner.decoder, sum(len(g.token_ids) for g in groups), None
    if isinstance(decoder, DraftHead):
        zeros = torch.zeros(rows, decoder.config.hidden_size, dtype=decoder.dtype)
        features = runner.ops.place(zeros)
    step = build_step_input(groups, groups[0].table.pool.updates, num_slots=num_slots)
    return runner.launch(step, features).logits


class MeasuredStep(NamedTuple):
    """A step to measure: equally many rows for each request, after `context` tokens."""

    rows: int
    requests: int
    context: int

    @property
    def words(self) -> str:
        if self.requests > 1:
            return f"{self.requests} requests"
        return f"{self.rows} row{'s' * (self.rows > 1)}"


# The first three show the cost of rows, the next one that of requests, the others that of context.
STEPS = (
    *(MeasuredStep(rows, 1, 128) for rows in (1, 8, 64)),
    MeasuredStep(8, 8, 128),
    *(MeasuredStep(rows, 1, 2048) for rows in (1, 8, 64)),
)


@torch.inference_mode()
def measure(runner: Runner, pool: BlockPool, costs: StepCosts, config: Config, max_len: int) -> str:
    """Measure STEPS, so that `costs` is known before the first request; return the times as text.
    Costs of an earlier start need no measurement.
    """
    if costs.has_steps:
        return "known from an earlier start"
    most, longest = min(rows_of_steps(config)), positions_of(runner, pool, max_len) - TREE_SLOTS
    each = [step._replace(context=min(step.context, longest)) for step in STEPS]
    end, found = perf_counter() + MEASURING, defaultdict[int, list[str]](list)
    with runner.ops.lock:
        for step in dict.fromkeys(step for step in each if step.rows <= most):
            columns = step.rows, step.context * step.requests, step.requests
            if perf_counter() + (1 + KNOWN) * costs.seconds(*columns) > end:
                continue
            seconds = measured(step, runner, pool)
            for one in seconds:
                costs.observe(*columns, one)
            if seconds:
                found[step.context].append(f"{step.words} {1e3 * median(seconds):.3g} ms")
    costs.doubt()  # other load may have slowed these steps
    words = (f"after {context} tokens: {', '.join(some)}" for context, some in found.items())
    return "; ".join(words) or "not measured"


def measured(step: MeasuredStep, runner: Runner, pool: BlockPool) -> list[float]:
    """Return the seconds of KNOWN steps; none if they do not fit into the pool."""
    tables = [table_of(runner, pool) for _ in range(step.requests)]
    rows = step.rows // step.requests
    groups = [RowGroup(table, [0] * rows, step.context, rows) for table in tables]
    greedy = SampleParams.greedy(step.rows)

    def timed() -> float:
        start = perf_counter()
        logits = run(runner, groups)
        runner.ops.top_children(logits, greedy, 1, 1.0)[0].tolist()  # waits for a GPU
        return perf_counter() - start

    try:
        if not all(table.try_reserve(step.context + TREE_SLOTS) for table in tables):
            return []
        timed()  # the first one takes longer than the others
        return [timed() for _ in range(KNOWN)]
    finally:
        for table in tables:
            table.clear()


def model_key(runner: Runner) -> str:
    """Return all values that the time of a step depends on, except the machine."""
    decoder, kv_dtype = runner.decoder, runner.kv.layers[0].k.dtype
    return f"{VERSION} {decoder.dtype} {kv_dtype} {decoder.forms} {decoder.config}"


FORMAT = "4"  # version of the file's format: change it with the meaning of its numbers


class KeptCosts:
    """The costs of a model's steps, and their file."""

    def __init__(self, costs: StepCosts, file: Path | None) -> None:
        """Start with the file's costs."""
        self.costs, self.file = costs, file
        known = read_costs(file)
        if known is not None:
            costs.begin_with(known)

    def write(self) -> None:
        keep_costs(self.file, self.costs)


def costs_file(model: str, device: str, threads: str) -> Path | None:
    """Return the file for a model's steps on this kind of machine. `model` identifies everything
    that affects step times, `device` names the GPU.
    """
    cpu = cpu_name().decode(errors="replace")
    build = VERSION, FORMAT, source_hash()
    return kept_file("costs", *build, model, device, threads, str(topology()), cpu)


def read_costs(file: Path | None) -> KnownCosts | None:
    """Return the stored costs. None, with one warning, if the file is invalid; None if it is
    absent.
    """
    return read_kept(file, KnownCosts)


def keep_costs(file: Path | None, costs: StepCosts) -> None:
    """Replace the file if any step was timed. It is slow: do not call it in every step."""
    known = costs.known()
    if file is not None and known.buckets:
        keep(file, known)
