"""One model, target or draft, with its KV: a StepInput in, logits or tokens out."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specserve.engine.step_input import AskedLogprobs, Draws, StepInput
from specserve.memory.arena import Arena
from specserve.memory.pool import KVUpdates
from specserve.models.decoder import LoadedModel
from specserve_kernels import KVCache, Logprobs, Ops, SampleParams, Threads
from specserve_kernels.ops import Outputs

HEAD_ROWS = 64  # rows whose logits are in memory at a time


class KVLost(RuntimeError):
    """Pending KV updates failed, so that the arena's contents are not known."""


class Launched(NamedTuple):
    """A step that has been started.

    logits    [n, V]  of the rows that are read, until the runner's next launch; empty [0, 0] where
                      none is, or where the head ran in slices
    tokens    [n]     int64, drawn after each of these rows, where ops.samples_ahead or the head ran
                      in slices; else None
    logprobs  of these tokens, where they were asked for and the head ran in slices; else None
    """

    logits: Tensor
    tokens: Tensor | None
    logprobs: Logprobs | None = None


class Answers:
    """The target's token after each row that was read."""

    def __init__(self, ops: Ops, draws: Draws, launched: Launched) -> None:
        self.ops, self.draws, self.logits = ops, draws, launched.logits
        self.known = launched.logprobs
        # One wait for the device brings all tokens.
        self.tokens = None if launched.tokens is None else launched.tokens.tolist()

    @property
    def has_logits(self) -> bool:
        """Whether the logits of all rows that were read are there."""
        return len(self.logits) > 0

    def after(self, rows: list[int]) -> list[int]:
        """The tokens after some of the rows that are read; drawn here unless they were ahead."""
        if self.tokens is not None:
            return [self.tokens[row] for row in rows]
        at = np.array(rows, np.int64)
        params = self.draws.params(at)
        tokens: list[int] = self.ops.sample(self.logits, torch.from_numpy(at), params).tolist()
        return tokens

    def logprobs(self, rows: list[int], tokens: list[int], k: int) -> Logprobs:
        """Of the tokens after some of the rows that are read, and of the k likeliest."""
        if self.known is not None:
            return Logprobs._make(x[rows] for x in self.known)
        return self.ops.logprobs(self.logits, torch.tensor(rows), torch.tensor(tokens), k)


class Runner:
    """Runs one model's steps. The caller is in torch.inference_mode already, as entering it for
    every draft level would cost time.
    """

    def __init__(
        self,
        decoder: LoadedModel,
        arena: Arena,
        kv: KVCache,
        max_rows: int = 1,
        max_read: int = 1,
        taps: Collection[int] = (),
    ) -> None:
        """`kv` is the model's view of the arena. Memory is reserved for steps of up to so many rows
        and rows that are read. What comes into the layers in `taps` is among `outputs`.
        """
        self.decoder, self.ops, self.arena = decoder, decoder.ops, arena
        self.kv, self.head_rows = kv, min(max_read, HEAD_ROWS)
        self.program = decoder.program(self.kv, max_rows, self.head_rows, taps)
        self.threads: Threads | None = None  # None keeps torch's number
        self.outputs: Outputs | None = None  # of the last launch

    def launch(self, step: StepInput, residual: Tensor | None = None) -> Launched:
        """Do the step's KV updates, write the KV of all its rows, compute the logits that are
        read. KVLost where the updates fail. A step that draws nothing may start from a residual.
        """
        if step.updates:
            self.update(step.updates)
        with self.using_threads(len(step.token_ids)):
            return self.compute(step, residual)

    @contextmanager
    def using_threads(self, rows: int) -> Iterator[None]:
        """For a forward of so many rows."""
        if self.threads is None:
            yield
            return
        start = perf_counter()
        self.threads.use(rows)
        yield
        self.threads.observe(rows, perf_counter() - start)

    def compute(self, step: StepInput, residual: Tensor | None = None) -> Launched:
        token_ids, read = torch.from_numpy(step.token_ids), torch.from_numpy(step.read)
        if step.draws is not None and self.is_sliced(step, step.draws):
            return self.compute_in_slices(step, token_ids, read, step.draws)
        if not self.ops.samples_ahead or step.draws is None or len(read) == 0:
            self.outputs = self.program.run(step.rows(), token_ids, read, residual=residual)
            logits = self.outputs.logits
            return Launched(torch.empty(0, 0) if logits is None else logits, None)
        each, params = torch.arange(len(read)), step.draws.params()
        # Columns go along with the step's inputs. Lists and masks may take more room than there is.
        also: Sequence[Tensor] = [each, *params.columns] if params.is_plain else []
        self.outputs = self.program.run(step.rows(), token_ids, read, also)
        _, logits, _, also = self.outputs
        assert logits is not None, "rows were to be read"
        if also:
            each, *columns = also
            params = SampleParams.of(columns)
        return Launched(logits, self.ops.sample(logits, each, params))

    def is_sliced(self, step: StepInput, draws: Draws) -> bool:
        """Whether all tokens are drawn as soon as some of the rows have their logits."""
        is_scored = step.logprobs is not None and len(step.logprobs.rows) > 0
        is_lost = len(step.read) > HEAD_ROWS or is_scored
        return bool(draws.processors) or (is_lost and not self.ops.samples_ahead)

    def compute_in_slices(
        self, step: StepInput, token_ids: Tensor, read: Tensor, draws: Draws
    ) -> Launched:
        """As `compute`, with the logits of HEAD_ROWS rows at a time; their tokens are all drawn."""
        tokens, told = [torch.empty(0, dtype=torch.int64)], []
        asked = step.logprobs
        self.outputs = self.program.run(step.rows(), token_ids, read[:HEAD_ROWS])
        logits = self.outputs.logits
        for first in range(0, len(read), HEAD_ROWS):
            some = read[first : first + HEAD_ROWS]
            if first > 0:
                logits = self.program.logits(some)
            assert logits is not None, "rows were to be read"
            params = draws.params(np.arange(first, first + len(some)))
            given = draws.processed(logits, first)
            tokens.append(self.ops.sample(given, torch.arange(len(some)), params).cpu())
            if asked is not None and asked.is_drawn:
                told.append(self.logprobs(logits, tokens[-1], asked.k))
        known = joined(told) if told else None
        return Launched(torch.empty(0, 0), torch.cat(tokens), known)

    def score(self, asked: AskedLogprobs) -> Logprobs:
        """Of the prompts' tokens that come after rows of the last launch, whose logits are lost
        where they are not drawn ahead.
        """
        told = []
        for first in range(0, len(asked.rows), self.head_rows):
            some = slice(first, first + self.head_rows)
            logits = self.program.logits(torch.from_numpy(asked.rows[some]))
            told.append(self.logprobs(logits, torch.from_numpy(asked.tokens[some]), asked.k))
        return joined(told)

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
        given = tokens.cpu().clamp(min=0)  # a row may have no token
        return self.ops.logprobs(logits, torch.arange(len(tokens)), given, k)

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


def joined(each: Sequence[Logprobs]) -> Logprobs:
    return Logprobs._make(map(torch.cat, zip(*each, strict=True)))
