"""At start-up: chooses the number of threads for a model's steps, and runs the kernels once."""

import torch
from torch import Tensor

from specserve.config import Config
from specserve.engine.loading import Model, asked_for, device_refused
from specserve.engine.runner import RowGroup, Runner, build_step_input
from specserve.errors import ConfigError
from specserve.memory.blocks import BlockPool, BlockTable
from specserve.models.draft_head import DraftHead
from specserve.version import VERSION
from specserve_drafters.candidates import TREE_SLOTS
from specserve_kernels import DeviceError, Threads

CONTEXT = 256  # tokens before the rows of a step that runs at start-up


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
    rows.
    """
    table = BlockTable(pool, runner.kv.block_size)
    # A draft model may have fewer
    positions = min(max_len + TREE_SLOTS, runner.decoder.num_positions)
    positions = min(positions, pool.num_blocks * table.block_size)
    start = max(0, min(CONTEXT, positions - TREE_SLOTS))
    most = min(config.scheduler.max_batched_tokens, positions - start)

    def step(rows: int) -> Tensor:
        table.try_reserve(start + max(most, TREE_SLOTS))
        tree = RowGroup(table, [0] * 3, start, 3, start, [0b1, 0b11, 0b101])
        run(runner, tree, num_slots)
        # On a GPU the first use of a KV move compiles its kernel.
        slot = torch.tensor([table.slot(0)])
        runner.ops.move_kv(runner.kv, slot, slot)
        group = RowGroup(table, [0] * rows, start, num_read=1)
        if num_slots and runner.ops.records_steps:
            run(runner, group._replace(slot=0), num_slots)
        return run(runner, group, num_slots)

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


def run(runner: Runner, group: RowGroup, num_slots: int) -> Tensor:
    """Run a step of these rows; return its logits. A draft head gets features of zeros."""
    decoder, rows, features = runner.decoder, len(group.token_ids), None
    if isinstance(decoder, DraftHead):
        zeros = torch.zeros(rows, decoder.config.hidden_size, dtype=decoder.dtype)
        features = runner.ops.place(zeros)
    updates = group.table.pool.updates
    return runner.launch(build_step_input([group], updates, num_slots=num_slots), features).logits


def model_key(runner: Runner) -> str:
    """Return all values that the time of a step depends on, except the machine."""
    decoder, kv_dtype = runner.decoder, runner.kv.layers[0].k.dtype
    return f"{VERSION} {decoder.dtype} {kv_dtype} {decoder.forms} {decoder.config}"
