"""How many threads run a model's steps, and what first steps have to do at load."""

import torch
from torch import Tensor

from specserve.config import Config
from specserve.engine.loading import Model, asked_for, device_refused
from specserve.engine.runner import Runner
from specserve.engine.step_input import RowGroup, build_step_input
from specserve.errors import ConfigError
from specserve.memory import BlockPool, BlockTable
from specserve.models.decoder import Decoder
from specserve.version import VERSION
from specserve_drafters.tree import TREE_SLOTS
from specserve_kernels import DeviceError, Threads

CONTEXT = 256  # tokens before the rows of a step that is run at load


def tune(model: Model, runner: Runner, pool: BlockPool, config: Config, max_len: int) -> str:
    """Give the runner its threads, in words: the model's, unless the config says how many."""
    if model.threads is None or config.model.threads is not None:
        model.threads = choose_threads(runner, pool, config, max_len)
    runner.threads, words = model.threads
    return words


@torch.inference_mode()
def choose_threads(
    runner: Runner, pool: BlockPool, config: Config, max_len: int
) -> tuple[Threads, str]:
    """As the build of the ops has it, which may run steps with as many rows as there can be."""
    table = BlockTable(pool, runner.kv.block_size)
    positions = min(max_len + TREE_SLOTS, len(runner.decoder.rotary.cos))  # a draft may have fewer
    positions = min(positions, pool.num_blocks * table.block_size)
    start = max(0, min(CONTEXT, positions - TREE_SLOTS))
    most = min(config.scheduler.max_batched_tokens, positions - start)

    def step(rows: int) -> Tensor:
        table.try_reserve(start + max(most, TREE_SLOTS))
        warm_up(runner, table, start)
        group = RowGroup(table, [0] * rows, start, num_read=1)
        return runner.launch(build_step_input([group], pool.updates)).logits

    try:
        return runner.ops.tune(step, most, config.model.threads, model_key(runner.decoder))
    except ValueError as e:
        raise ConfigError(f"model.threads: {e}") from e
    except DeviceError as e:
        raise device_refused(config, e) from e
    except torch.OutOfMemoryError as e:
        raise ConfigError(
            f"beside weights and KV pool too little memory is left for a step of {most} rows "
            f"({asked_for(e)}): lower memory.kv_bytes or memory.kv_fraction, or "
            "scheduler.max_batched_tokens"
        ) from e
    finally:
        table.clear()


def warm_up(runner: Runner, table: BlockTable, start: int) -> None:
    """A root with two children, and a KV move: on a GPU their first use compiles kernels."""
    tree = RowGroup(table, [0] * 3, start, 3, start, [0b1, 0b11, 0b101])
    runner.launch(build_step_input([tree], table.pool.updates))
    slot = torch.tensor([table.slot(0)])
    runner.ops.move_kv(runner.kv, slot, slot)


def model_key(decoder: Decoder) -> str:
    """All that the time of a step depends on but for the machine."""
    return f"{VERSION} {decoder.dtype} {decoder.config}"
