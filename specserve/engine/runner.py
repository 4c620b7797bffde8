"""One model, target or draft, with its KV: a StepInput in, logits or tokens out."""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specserve.engine.step_input import Draws, StepInput
from specserve.memory import Arena, KVUpdates
from specserve.models.decoder import Decoder
from specserve_kernels import Ops, SampleParams, Threads

HEAD_ROWS = 64  # rows whose logits are in memory at a time, where all are drawn from at once


class KVLost(RuntimeError):
    """Pending KV updates failed, so that the arena's contents are not known."""


class Launched(NamedTuple):
    """A step that has been started.

    logits  [n, V]  of the rows that are read, until the runner's next launch; empty [0, 0] where
                    none is, or where the tokens after more than HEAD_ROWS rows are drawn
    tokens  [n]     int64, drawn after each of these rows, where ops.samples_ahead or there are more
                    than HEAD_ROWS; else None
    """

    logits: Tensor
    tokens: Tensor | None


class Answers:
    """The target's token after each row that was read."""

    def __init__(self, ops: Ops, draws: Draws, launched: Launched) -> None:
        self.ops, self.draws, self.logits = ops, draws, launched.logits
        # One wait for the device brings all tokens.
        self.tokens = None if launched.tokens is None else launched.tokens.tolist()

    def after(self, rows: list[int]) -> list[int]:
        """The tokens after some of the rows that are read; drawn here unless they were ahead."""
        if self.tokens is not None:
            return [self.tokens[row] for row in rows]
        at = np.array(rows, np.int64)
        params = self.draws.params(at)
        tokens: list[int] = self.ops.sample(self.logits, torch.from_numpy(at), params).tolist()
        return tokens


class Runner:
    """Runs one model's steps. The caller is in torch.inference_mode already, as entering it for
    every draft level would cost time.
    """

    def __init__(
        self, decoder: Decoder, arena: Arena, name: str, max_rows: int = 1, max_read: int = 1
    ) -> None:
        """Memory is reserved for steps of up to so many rows and rows that are read."""
        self.decoder, self.ops, self.arena = decoder, decoder.ops, arena
        self.kv = arena.views[name]
        self.program = self.ops.program(decoder, self.kv, max_rows, min(max_read, HEAD_ROWS))
        self.threads: Threads | None = None  # None keeps torch's number

    def launch(self, step: StepInput) -> Launched:
        """Do the step's KV updates, write the KV of all its rows, compute the logits that are
        read. KVLost where the updates fail.
        """
        if step.updates:
            self.update(step.updates)
        if self.threads is None:
            return self.compute(step)
        rows, start = len(step.token_ids), perf_counter()
        self.threads.use(rows)
        launched = self.compute(step)
        self.threads.observe(rows, perf_counter() - start)
        return launched

    def compute(self, step: StepInput) -> Launched:
        token_ids, read = torch.from_numpy(step.token_ids), torch.from_numpy(step.read)
        if step.draws is not None and len(read) > HEAD_ROWS and not self.ops.samples_ahead:
            return self.compute_in_slices(step, token_ids, read, step.draws)
        if not self.ops.samples_ahead or step.draws is None or len(read) == 0:
            logits = self.program.run(step.rows(), token_ids, read).logits
            return Launched(torch.empty(0, 0) if logits is None else logits, None)
        each, params = torch.arange(len(read)), step.draws.params()
        # Columns go along with the step's inputs. Lists and masks may take more room than there is.
        also: Sequence[Tensor] = [each, *params.columns] if params.is_plain else []
        _, logits, _, also = self.program.run(step.rows(), token_ids, read, also)
        assert logits is not None, "rows were to be read"
        if also:
            each, *columns = also
            params = SampleParams.of(columns)
        return Launched(logits, self.ops.sample(logits, each, params))

    def compute_in_slices(
        self, step: StepInput, token_ids: Tensor, read: Tensor, draws: Draws
    ) -> Launched:
        """As `compute`, with the logits of HEAD_ROWS rows at a time; their tokens are all drawn."""
        tokens = []
        for first in range(0, len(read), HEAD_ROWS):
            some = read[first : first + HEAD_ROWS]
            if first == 0:
                logits = self.program.run(step.rows(), token_ids, some).logits
            else:
                logits = self.program.logits(some)
            assert logits is not None, "rows were to be read"
            params = draws.params(np.arange(first, first + len(some)))
            tokens.append(self.ops.sample(logits, torch.arange(len(some)), params))
        return Launched(torch.empty(0, 0), torch.cat(tokens))

    def collect(self, step: StepInput, launched: Launched) -> Answers:
        """The target's tokens of a launched step; waits for the device where it is a GPU."""
        assert step.draws is not None, "a step without draws has no answers"
        return Answers(self.ops, step.draws, launched)

    def update(self, updates: KVUpdates) -> None:
        """Do the moves of every model, then the copies; KVLost if one fails."""
        try:
            for name, slots in updates.moves.items():
                self.ops.move_kv(self.arena.views[name], *columns(slots))
            if len(updates.copies):
                self.ops.copy_blocks(self.arena.blocks, *columns(updates.copies))
        except Exception as e:
            raise KVLost(f"KV could not be moved ({e})") from e


def columns(pairs: np.ndarray) -> tuple[Tensor, Tensor]:
    source, target = np.ascontiguousarray(pairs.T)
    return torch.from_numpy(source), torch.from_numpy(target)
