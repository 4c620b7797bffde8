"""Runs one model, target or draft, with its KV: a StepInput in, logits or tokens out."""

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.exchange.sampling_params import Sampling
from specserve.memory.arena import Arena
from specserve.memory.blocks import BlockTable, KVUpdates, PendingUpdates
from specserve.memory.states import StateReplay
from specserve.models.decoder import LoadedModel
from specserve.scheduling import Request, ScheduledRequest
from specserve.scheduling.text_state import (
    NodeMask,
    TextState,
    edits_of,
    masks_of,
    node_masks_of,
)
from specserve_drafters import Draft
from specserve_kernels import (
    AdapterRows,
    Edits,
    KVCache,
    Logprobs,
    Masks,
    Ops,
    Program,
    Replays,
    Rows,
    SampleParams,
    StateLayer,
    StateRows,
    StepColumns,
    Threads,
    all_rows,
    reserve,
    tensor_of,
)
from specserve_kernels.ops import Outputs

Processor = Callable[[Tensor], Tensor]
Returned = TypeVar("Returned")


class Draws(NamedTuple):
    """Sampling parameters of the token after each of n rows; the fields are as in SampleParams.

    processors  callers' functions, by row: they change the logits [V] float32 before other edits
    node_masks  masks by row, instead of `masks`: each is computed when its row's token is sampled
    """

    is_greedy: bool  # every temperature is 0: the columns after it have no effect
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    token_index: NDArray[np.int64]
    edits: Edits | None = None
    masks: Masks | None = None
    processors: Mapping[int, Processor] = {}
    node_masks: Mapping[int, NodeMask] = {}

    @property
    def is_fast(self) -> bool:
        """Return whether a row's token takes hardly more time than finding the row."""
        return self.is_greedy and not self.node_masks

    def params(self, rows: NDArray[np.int64] | None = None) -> SampleParams:
        """Return the parameters of all rows, or of some, as host tensors."""
        if self.edits is None and self.masks is None and not self.node_masks:
            return self.plain_params(rows)
        params = self.plain_params()._replace(edits=self.edits, masks=self.masks)
        if rows is not None:
            params = params.take(torch.from_numpy(rows))
        if not self.node_masks:
            return params
        each = range(len(self.seeds)) if rows is None else rows.tolist()
        return params._replace(masks=self.with_node_masks(params.masks, each))

    def with_node_masks(self, masks: Masks | None, rows: Sequence[int]) -> Masks | None:
        """Return the masks of some rows, with the node masks that are computed now."""
        found = [(i, self.node_masks[row]) for i, row in enumerate(rows) if row in self.node_masks]
        if not found:
            return masks
        number = torch.zeros(len(rows), dtype=torch.int32)
        words = list[Tensor]()
        if masks is not None:
            number, words = masks.number.clone(), [*masks.words]
        for i, node in found:
            words.append(node.words())
            number[i] = len(words)
        return Masks(number, torch.stack(words))

    def plain_params(self, rows: NDArray[np.int64] | None = None) -> SampleParams:
        """Return the parameters without edits and masks."""
        if self.is_greedy:
            return SampleParams.greedy(len(self.seeds if rows is None else rows))
        columns: Sequence[NDArray[Any]] = self[1:7]
        if rows is not None:
            columns = [column[rows] for column in columns]
        return SampleParams.of(map(torch.from_numpy, columns))

    def processed(self, logits: Tensor, first: int) -> Tensor:
        """Return the logits of the rows from `first` on after processors; a copy if any row has
        one.
        """
        rows = [row for row in self.processors if first <= row < first + len(logits)]
        if not rows:
            return logits
        changed = logits.float().clone()
        for row in rows:
            own = changed[row - first]
            own.copy_(self.processors[row](own.cpu()))
        return changed


class AskedLogprobs(NamedTuple):
    """The logprobs that a step must return.

    k         number of most likely tokens per position, next to the token itself
    is_drawn  whether sampled tokens are included
    rows      [m]  int64  rows before prompt tokens whose logprobs are returned
    tokens    [m]  int64  these prompt tokens
    """

    k: int
    is_drawn: bool
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]


@cache
def greedy_draws(n: int) -> Draws:
    """Return parameters for the most likely token after each of n rows. Cached, so never written
    to.
    """
    zeros, ones = np.zeros(n, np.float32), np.ones(n, np.float32)
    integers = np.zeros(n, np.int64)
    return Draws(True, zeros, integers.astype(np.int32), ones, zeros, integers, integers)


def draws_of(
    samplings: Sequence[Sampling],
    lengths: Sequence[int],
    drafts: Sequence[Draft],
    states: Sequence[TextState | None] = (),
) -> Draws:
    """Return parameters for the root and every draft token of each request, request by request.

    `states` is empty if no request has one. `lengths` counts the requests' known tokens. The token
    after a node has index length + depth in its request's token_ids, and is sampled with that
    index's noise, for any node number.
    """
    draws = plain_draws(samplings, lengths, drafts)
    if not any(states):
        return draws
    return draws._replace(
        edits=edits_of(states, drafts),
        masks=masks_of(states, drafts),
        node_masks=node_masks_of(states, drafts),
    )


def plain_draws(
    samplings: Sequence[Sampling], lengths: Sequence[int], drafts: Sequence[Draft]
) -> Draws:
    """Return parameters without edits and masks."""
    if all([s.temperature == 0 for s in samplings]):
        return greedy_draws(len(drafts) + sum([len(draft.tokens) for draft in drafts]))
    places = [n + depth for n, d in zip(lengths, drafts, strict=True) for depth in d.depths()]
    each = [s for s, d in zip(samplings, drafts, strict=True) for _ in range(1 + len(d))]
    return Draws(
        False,
        np.array([s.temperature for s in each], np.float32),
        np.array([s.top_k for s in each], np.int32),
        np.array([s.top_p for s in each], np.float32),
        np.array([s.min_p for s in each], np.float32),
        np.array([s.seed for s in each], np.int64),
        np.array(places, np.int64),
    )


class RowGroup(NamedTuple):
    """One request's rows: tokens in the slots [start, start + n) of its table.

    Rows without masks are causal. Rows with masks are nodes of a tree that see the slots
    [0, prefix), and slot prefix + j for each bit j of their mask.
    """

    table: BlockTable
    token_ids: "array[int] | list[int]"
    start: int
    num_read: int  # rows at the end whose logits are read
    prefix: int = 0
    masks: list[int] | None = None
    slot: int = -1  # slot of the request's adapter; -1: no adapter
    num_known: int | None = None  # leading rows of known tokens; None: all
    first_kept: int = 0  # place of the first draft token's inputs of recurrent ops


class StepInput(NamedTuple):
    """A step as plain arrays, which a recorded graph or a native program could also take.

    updates    done first, to any model's KV
    columns    token ids, rows, and the rows whose logits are read, ascending
    draws      sampling parameters of the token after each of these; None: only logits are needed
    logprobs   logprobs to return; None: none
    adapters   adapters of rows; None: no row has one
    states     recurrent states of the requests; None: they have none
    """

    updates: KVUpdates
    columns: StepColumns
    draws: Draws | None
    logprobs: AskedLogprobs | None = None
    adapters: AdapterRows | None = None
    states: StateRows | None = None

    def rows(self) -> Rows:
        """Return the rows as the ops take them; host tensors that share the arrays' memory."""
        return self.columns.rows(self.adapters, self.states)

    @property
    def num_rows(self) -> int:
        return len(self.columns.token_ids)


def build_step_input(
    groups: Sequence[RowGroup],
    pending: PendingUpdates,
    draws: Draws | None = None,
    logprobs: AskedLogprobs | None = None,
    num_slots: int = 0,
    has_states: bool = True,
) -> StepInput:
    """Build one step of all the groups' rows, in order; `num_slots` is the number of adapter slots.
    Without `has_states`, the model has no recurrent layers, whatever the tables hold.

    The pending updates are taken last, when errors are unlikely: from then on they are lost unless
    the step is launched.
    """
    columns = StepColumns.empty()
    add_groups(columns, groups)
    return StepInput(
        updates=pending.take(),
        columns=columns,
        draws=draws,
        logprobs=logprobs,
        adapters=adapter_rows(groups, num_slots) if num_slots else None,
        states=state_rows(groups) if has_states else None,
    )


def step_input_of(
    scheduled: Sequence[ScheduledRequest],
    sampled: Sequence[ScheduledRequest],
    pending: PendingUpdates,
    vocab_size: int,
    num_slots: int,
) -> StepInput:
    """Build the target's step for these requests. `sampled` are the requests whose last known token
    is in the step.
    """
    requests = [item.request for item in sampled]
    if is_plain(scheduled, requests, num_slots):
        columns = StepColumns.empty()
        add_roots(columns, scheduled)
        each = [item.draft for item in sampled]
        lengths = [item.end for item in sampled]
        draws = plain_draws([r.sampling for r in requests], lengths, each)
        return StepInput(pending.take(), columns, draws)
    has_text = False
    for request in requests:
        # Do this here and not on arrival, because many prompts may arrive between two steps.
        if request.text is None and request.sampling.changes_logits:
            request.begin_text(vocab_size)
        has_text |= request.text is not None
    draws = draws_of(
        [r.sampling for r in requests],
        [len(r.token_ids) for r in requests],
        [item.draft for item in sampled],
        [r.text for r in requests] if has_text else (),
    )
    if any(r.processors is not None for r in requests):
        draws = draws._replace(processors=processors_of(sampled))
    wants_logprobs = any(item.request.wants_logprobs for item in scheduled)
    logprobs = asked_logprobs(scheduled, sampled, vocab_size) if wants_logprobs else None
    num_kept = 0
    for item in scheduled:
        item.first_kept = num_kept
        num_kept += len(item.draft.tokens)
    groups = [rows_of(item) for item in scheduled]
    return build_step_input(groups, pending, draws, logprobs, num_slots)


def is_plain(
    scheduled: Sequence[ScheduledRequest], requests: Sequence[Request], num_slots: int
) -> bool:
    """Return whether a step has only roots, without draft tokens, logprobs and changes of logits.
    `requests` are those that sample a token.
    """
    if num_slots or len(requests) < len(scheduled) or scheduled[0].request.table.state.size:
        return False
    # Lists: a generator's frame takes longer than the rest of a request.
    if any([item.draft.tokens or item.end - item.start > 1 for item in scheduled]):
        return False
    return all([request.is_plain for request in requests])


def add_roots(columns: StepColumns, roots: Sequence[ScheduledRequest]) -> None:
    """Add a row for each request, its last known token, to empty columns."""
    num, indices = len(roots), columns.indices
    for item in roots:
        table, start = item.request.table, item.start
        block, offset = divmod(start, table.block_size)
        indices.extend(table.blocks[: block + 1])
        columns.indptr.append(len(indices))
        columns.last_page_len.append(offset + 1)
        columns.slots.append(indices[-1] * table.block_size + offset)
    starts = [item.start for item in roots]
    columns.token_ids.extend([item.request.token_ids[item.start] for item in roots])
    columns.positions.extend(starts)
    columns.prefix.extend([start + 1 for start in starts])
    columns.mask.frombytes(bytes(columns.mask.itemsize * num))
    columns.qo_indptr.extend(range(1, num + 1))
    columns.read.extend(range(num))


def asked_logprobs(
    scheduled: Sequence[ScheduledRequest], sampled: Sequence[ScheduledRequest], vocab_size: int
) -> AskedLogprobs | None:
    """Return the logprobs that a step must return; None for none."""
    rows, tokens, most = list[int](), list[int](), list[int]()
    sizes = [item.end - item.start + len(item.draft) for item in scheduled]
    for item, first in zip(scheduled, accumulate(sizes, initial=0), strict=False):
        places = scored(item)
        rows += [first + place - item.start for place in places]
        tokens += item.request.token_ids[places.start + 1 : places.stop + 1]
        most += [item.request.sampling.prompt_logprobs or 0] if places else []
    drawn = [s.request.sampling.logprobs for s in sampled]
    most += [k for k in drawn if k is not None]
    if not most:
        return None
    k, is_drawn = min(max(most), vocab_size), any(k is not None for k in drawn)
    return AskedLogprobs(k, is_drawn, np.array(rows, np.int64), np.array(tokens, np.int64))


def scored(item: ScheduledRequest) -> range:
    """Return the rows' positions before prompt tokens whose logprobs were not reported."""
    request = item.request
    if not request.is_scoring or request.sampling.pooling is not None:
        return range(0)
    return range(max(item.start, request.num_scored), min(item.end, request.num_prompt - 1))


def rows_of(item: ScheduledRequest) -> RowGroup:
    """Return a request's rows for the target: causal rows, or a root and its tree."""
    r, draft = item.request, item.draft
    tokens = r.token_ids[item.start : item.end]
    if not draft.tokens:
        return RowGroup(r.table, tokens, item.start, int(item.is_sampled), slot=r.slot)
    nodes = tokens.tolist() + draft.tokens
    tree = RowGroup(r.table, nodes, item.start, len(nodes), slot=r.slot)
    tree = tree._replace(num_known=len(tokens), first_kept=item.first_kept)
    return tree if draft.is_chain else tree._replace(prefix=item.start, masks=draft.masks())


def processors_of(sampled: Sequence[ScheduledRequest]) -> dict[int, Processor]:
    """Return processors by row that is read; these requests have no draft tokens."""
    roots = accumulate([1 + len(item.draft) for item in sampled], initial=0)
    return {
        root: partial(item.request.processors, item.request.output)
        for item, root in zip(sampled, roots, strict=False)
        if item.request.processors is not None
    }


def adapter_rows(groups: Sequence[RowGroup], num_slots: int) -> AdapterRows | None:
    if all(group.slot < 0 for group in groups):
        return None
    slots = [group.slot for group in groups for _ in group.token_ids]
    return AdapterRows.of(slots, num_slots)


def state_rows(groups: Sequence[RowGroup]) -> StateRows | None:
    """Return how the groups use their recurrent states; None without states."""
    if not any(group.table.state.blocks for group in groups):
        return None
    states = [group.table.state for group in groups]
    none = [0] * states[0].size
    columns: Sequence[Sequence[Any]] = (
        [state.blocks for state in states],
        [len(g.token_ids) if g.num_known is None else g.num_known for g in groups],
        [group.first_kept for group in groups],
        [snapshot_at(group) for group in groups],
        [state.snapshot or none for state in states],
    )
    return StateRows._make(torch.tensor(column, dtype=torch.int32) for column in columns)


def snapshot_at(group: RowGroup) -> int:
    """Return after how many of the rows the state is copied; 0: these rows have no copy."""
    state, rows = group.table.state, len(group.token_ids)
    known = rows if group.num_known is None else group.num_known
    at = state.snapshot_end - group.start
    return at if state.snapshot and 0 < at <= known else 0


def add_groups(columns: StepColumns, groups: Sequence[RowGroup]) -> None:
    token_ids, qo_indptr, indptr, indices, last_page_len, *by_row, read = columns
    positions, slots, prefix, mask = by_row
    for group in groups:
        table, tokens, start, num_read, _, masks = group[:6]
        end = start + len(tokens)
        block, offset = divmod(end - 1, table.block_size)
        if end == start + 1 and masks is None:  # most groups: appending is faster than extending
            token_ids.append(tokens[0])
            positions.append(start)
            slots.append(table.blocks[block] * table.block_size + offset)
            prefix.append(end)
            mask.append(0)
        else:
            add_rows(columns, group)
        indices.extend(table.blocks[: block + 1])
        last_page_len.append(offset + 1)
        num_rows = len(token_ids)
        qo_indptr.append(num_rows)
        indptr.append(len(indices))
        read.extend(range(num_rows - num_read, num_rows))


def add_rows(columns: StepColumns, group: RowGroup) -> None:
    """Add a chunk of causal rows, or a tree."""
    table, tokens, start, _, prefix, masks = group[:6]
    end = start + len(tokens)
    # An array cannot be extended by an array of another type.
    columns.token_ids.extend(iter(tokens))
    columns.slots.extend(table.slots(start, end))
    if masks is None:
        columns.positions.extend(range(start, end))
        columns.prefix.extend(range(start + 1, end + 1))
        columns.mask.extend([0] * len(tokens))
    else:
        columns.positions.extend([prefix + mask.bit_count() - 1 for mask in masks])
        columns.prefix.extend([prefix] * len(masks))
        columns.mask.extend(masks)


HEAD_ROWS = 64  # most rows whose logits are in memory at a time


class KVLost(RuntimeError):
    """Pending KV updates failed, so the arena's contents are unknown."""


class Launched(NamedTuple):
    """A step that was started.

    logits    [n, V]  of the rows that are read, until the runner's next launch. It is empty [0, 0]
              if none is read, or if the head ran in slices
    tokens    [n]     int64, sampled after each of these rows, if ops.samples_ahead or the head
              ran in slices; else None
    logprobs  of these tokens, if requested and the head ran in slices; else None
    """

    logits: Tensor
    tokens: Tensor | None
    logprobs: Logprobs | None = None


# Logits of which greedy tokens are found in one call, also after rows that may not be reached: each
# level of a tree would need a call of its own
AT_ONCE = 1 << 20


class TargetTokens:
    """The target's token after each row that was read."""

    def __init__(self, ops: Ops, draws: Draws, launched: Launched) -> None:
        self.ops, self.draws, self.logits = ops, draws, launched.logits
        self.known = launched.logprobs
        # A single wait for the device returns all tokens.
        self.tokens = None if launched.tokens is None else launched.tokens.tolist()

    @property
    def has_logits(self) -> bool:
        """Return whether the logits of all rows that were read are available."""
        return len(self.logits) > 0

    def after(self, rows: Sequence[int]) -> list[int]:
        """Return the tokens after some of the rows that are read; sample them now unless they
        exist.
        """
        if self.tokens is None and self.draws.is_fast and self.logits.numel() <= AT_ONCE:
            every = all_rows(self.logits.shape[0])
            self.tokens = self.ops.sample(self.logits, every, self.draws.params()).tolist()
        if self.tokens is not None:
            return [self.tokens[row] for row in rows]
        at = np.array(rows, np.int64)
        params = self.draws.params(at)
        tokens: list[int] = self.ops.sample(self.logits, torch.from_numpy(at), params).tolist()
        return tokens

    def logprobs(self, rows: list[int], tokens: list[int], k: int) -> Logprobs:
        """Return logprobs of the tokens after some of the rows that are read, and of the k most
        likely.
        """
        if self.known is not None:
            return Logprobs._make(x[rows] for x in self.known)
        return self.ops.logprobs(self.logits, torch.tensor(rows), torch.tensor(tokens), k)


class Runner:
    """Runs one model's steps. Callers must be in torch.inference_mode, because entering it for
    every draft level would take time.
    """

    def __init__(
        self,
        decoder: LoadedModel,
        arena: Arena,
        kv: KVCache,
        max_rows: int = 1,
        max_read: int = 1,
        aux_layer_ids: Collection[int] = (),
        leading: Callable[[Program], Program] | None = None,
        state_size: int | None = None,
    ) -> None:
        """`kv` is the model's view of the arena. Memory is reserved for steps of `max_rows` rows,
        `max_read` of them read. `outputs` include the inputs of the layers in `aux_layer_ids`.
        `leading` returns a program whose runs other ranks repeat. `state_size`: blocks of a
        request's recurrent state; None: as many as this model needs.
        """
        self.decoder, self.ops, self.arena = decoder, decoder.ops, arena
        self.kv, self.head_rows = kv, min(max_read, HEAD_ROWS)
        program = decoder.program(self.kv, max_rows, self.head_rows, aux_layer_ids)
        self.program = program if leading is None else leading(program)
        self.threads: Threads | None = None  # None keeps torch's number
        self.outputs: Outputs | None = None  # outputs of the last launch
        # Blocks of a request's recurrent state; 0: no op has a state
        needed = max((1 + int(s.places[:, 0].max()) for s in kv.states), default=0)
        self.state_size = needed if state_size is None else state_size

    def launch(self, step: StepInput, residual: Tensor | None = None) -> Launched:
        """Do the step's KV updates, write the KV of all its rows, and compute the logits that are
        read. KVLost if the updates fail. A step that samples nothing may start from a residual.
        """
        if step.updates:
            self.update(step.updates)
        return self.on_threads(step.num_rows, partial(self.compute, step, residual))

    def on_threads(self, rows: int, run: Callable[[], Returned]) -> Returned:
        """Run a forward of so many rows on the number of threads that is best for them."""
        if self.threads is None:
            return run()
        start = perf_counter()
        self.threads.use(rows)
        result = run()
        self.threads.observe(rows, perf_counter() - start)
        return result

    def compute(self, step: StepInput, residual: Tensor | None = None) -> Launched:
        columns = step.columns
        if step.states is not None:
            borders = tensor_of(columns.qo_indptr)
            reserve_kept(self.kv.states, self.program, step.states, borders)
        if step.draws is not None and self.is_sliced(step, step.draws):
            return self.compute_in_slices(step, step.draws)
        if not self.ops.samples_ahead or step.draws is None or len(columns.read) == 0:
            if residual is None:
                self.outputs = self.program.run_columns(columns, step.adapters, step.states)
            else:
                given = tensor_of(columns.token_ids), tensor_of(columns.read)
                self.outputs = self.program.run(step.rows(), *given, residual=residual)
            logits = self.outputs.logits
            return Launched(torch.empty(0, 0) if logits is None else logits, None)
        each, params = all_rows(len(columns.read)), step.draws.params()
        # Columns travel with the step's inputs. Lists and masks may not fit there.
        also: Sequence[Tensor] = [each, *params.columns] if params.is_plain else []
        self.outputs = self.program.run_columns(columns, step.adapters, step.states, also)
        _, logits, _, also = self.outputs
        assert logits is not None, "rows were to be read"
        if also:
            each, *own = also
            params = SampleParams.of(own)
        return Launched(logits, self.ops.sample(logits, each, params))

    def is_sliced(self, step: StepInput, draws: Draws) -> bool:
        """Return whether tokens must be sampled slice by slice, because not all logits are kept."""
        is_scored = step.logprobs is not None and len(step.logprobs.rows) > 0
        is_lost = len(step.columns.read) > HEAD_ROWS or is_scored
        return bool(draws.processors) or (is_lost and not self.ops.samples_ahead)

    def compute_in_slices(self, step: StepInput, draws: Draws) -> Launched:
        """Do the same as `compute`, with the logits of HEAD_ROWS rows at a time; sample all their
        tokens.
        """
        tokens, logprobs = [torch.empty(0, dtype=torch.int64)], []
        asked, columns = step.logprobs, step.columns
        token_ids, read = tensor_of(columns.token_ids), tensor_of(columns.read)
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
                logprobs.append(self.logprobs(logits, tokens[-1], asked.k))
        known = joined(logprobs) if logprobs else None
        return Launched(torch.empty(0, 0), torch.cat(tokens), known)

    def score(self, asked: AskedLogprobs) -> Logprobs:
        """Return logprobs of prompt tokens after rows of the last launch. Their logits are computed
        again.
        """
        each = []
        for first in range(0, len(asked.rows), self.head_rows):
            some = slice(first, first + self.head_rows)
            logits = self.program.logits(torch.from_numpy(asked.rows[some]))
            each.append(self.logprobs(logits, torch.from_numpy(asked.tokens[some]), asked.k))
        return joined(each)

    def logits(self, rows: Sequence[int]) -> Iterator[Tensor]:
        """Yield the logits of rows of the last launch again, [n, V] for up to `head_rows` rows."""
        for first in range(0, len(rows), self.head_rows):
            yield self.program.logits(torch.tensor(rows[first : first + self.head_rows]))

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
        given = tokens.cpu().clamp(min=0)  # a row may have no token
        return self.ops.logprobs(logits, torch.arange(len(tokens)), given, k)

    def collect(self, step: StepInput, launched: Launched) -> TargetTokens:
        """Return the target's tokens of a launched step; waits for a GPU."""
        assert step.draws is not None, "a step without draws has no tokens"
        return TargetTokens(self.ops, step.draws, launched)

    def forget(self) -> None:
        """Drop results and recordings, because weights and KV may get other addresses."""
        self.outputs = None
        self.program.forget()

    def run_updates(self, pending: PendingUpdates) -> bool:
        """Do the pending updates without a forward; return whether there were any. Waits for their
        copies. KVLost if they fail.
        """
        if not pending:
            return False
        with self.ops.lock:
            self.update(pending.take())
            if self.arena.host is not None:
                self.arena.host.wait()
        return True

    def update(self, updates: KVUpdates) -> None:
        """Do the updates in the order of `KVUpdates`; KVLost if one fails."""
        try:
            if self.arena.repeat is not None:
                self.arena.repeat(updates)
            update_arena(self.ops, self.arena, updates)
        except Exception as e:
            raise KVLost(f"KV updates failed ({e})") from e


def reserve_kept(
    layers: Sequence[StateLayer], program: Program, states: StateRows, qo_indptr: Tensor
) -> None:
    """Make place for the inputs of a step's draft tokens. The replays of the last step's are
    done.
    """
    ends = states.kept + qo_indptr.diff() - states.committed
    if reserve(layers, int(ends.max())):
        program.forget()  # recordings have the old addresses


def update_arena(ops: Ops, arena: Arena, updates: KVUpdates) -> None:
    """Do the updates in the order of `KVUpdates`."""
    blocks, host = arena.blocks, arena.host
    for name, slots in updates.moves.items():
        ops.move_kv(arena.views[name], *columns(slots))
    if host is not None and updates.stores:
        host.store(blocks, updates.stores)
    if updates.replays:
        ops.replay(arena.states, replays_of(updates.replays, arena.state_size))
    if updates.copies:
        ops.copy_blocks(blocks, *columns(updates.copies))
    if host is not None and updates.loads:
        host.load(blocks, updates.loads)


def replays_of(replays: Sequence[StateReplay], size: int) -> Replays:
    """Return replays as the op takes them."""
    none, begins = [0] * size, [0, *accumulate(len(r.places) for r in replays)]
    columns: Sequence[Sequence[Any]] = (
        [r.blocks for r in replays],
        begins,
        [place for r in replays for place in r.places],
        [r.snapshot_at for r in replays],
        [r.snapshot or none for r in replays],
    )
    return Replays._make(torch.tensor(column, dtype=torch.int32) for column in columns)


def columns(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return [n] int64 each: the first and the second of each pair."""
    source, target = zip(*pairs, strict=True)
    return torch.tensor(source), torch.tensor(target)


def joined(each: Sequence[Logprobs]) -> Logprobs:
    return Logprobs._make(map(torch.cat, zip(*each, strict=True)))
