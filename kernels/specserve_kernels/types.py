"""What the ops take: the rows of a step, a model's view of the KV arena, sampling parameters; and
the threads that a step runs on.

Shapes: B requests, R rows, L layers, H and Hk query and KV heads, D head size, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

NO_WINDOW: tuple[int | None, ...] = (None,)
# Drawn in place of a token, if a row's greatest number is not finite.
NO_TOKEN = -1  # it is -inf: every token is ruled out
NOT_FINITE = -2  # it is +inf, or a number of the row is NaN


class AdapterRows(NamedTuple):
    """Which rows of a step have an adapter, of S slots; host tensors.

    order   [A]    int32  the rows that have one: by slot, and those of a slot ascending
    begins  [S+1]  int32  slot s has the rows order[begins[s]:begins[s+1]]
    places  [R]    int32  a row's place in `order`; -1: it has no adapter
    """

    order: Tensor
    begins: Tensor
    places: Tensor

    @classmethod
    def of(cls, slots: Sequence[int], num_slots: int) -> "AdapterRows":
        """Of the slot of each row; -1: it has no adapter."""
        by_slot: list[list[int]] = [[] for _ in range(num_slots)]
        for row, slot in enumerate(slots):
            if slot >= 0:
                by_slot[slot].append(row)
        order = [row for rows in by_slot for row in rows]
        places = [-1] * len(slots)
        for place, row in enumerate(order):
            places[row] = place
        begins = [0, *accumulate(map(len, by_slot))]
        return cls._make(torch.tensor(x, dtype=torch.int32) for x in (order, begins, places))


class AdapterSums(NamedTuple):
    """What adapters add to a linear map before anything else is done with it.

    sums    [.., N]  float32  in the build's own order
    places  [R]      int32    a row's place in `AdapterRows.order`; -1: it has no adapter
    """

    sums: Any
    places: Tensor


class PackedExperts(NamedTuple):
    """The weights of all experts, of one form: `each` and `joined` are a build's own.

    each    by expert
    bias    [E, N]  of the dtype of the rows that they multiply
    joined          what stands for all of them, if the build has such a form
    """

    each: Sequence[Any]
    bias: Tensor | None
    joined: Tensor | None = None


class Routing(NamedTuple):
    """The experts of each row, the likeliest first.

    weights  [R, k]  float32
    experts  [R, k]  int32
    """

    weights: Tensor
    experts: Tensor


class Rows(NamedTuple):
    """Where each row of a step stands and what it may see; host tensors.

    qo_indptr      [B+1]  int32  request b has the rows [qo_indptr[b], qo_indptr[b+1])
    indptr         [B+1]  int32  and the blocks indices[indptr[b]:indptr[b+1]], in logical order
    indices        [..]   int32  block numbers
    last_page_len  [B]    int32  slots in use of a request's last block, 1..block_size
    positions      [R]    int32  rotary position; for a tree row, prefix + its depth in the mask
    slots          [R]    int64  block number * block_size + offset: where the row's KV is written
    prefix         [R]    int32  the row sees its request's slots [0, prefix) ...
    mask           [R]    int64  ... and slot prefix + j for every bit j, its own slot included

    A causal row has prefix = position + 1 and no mask. Rows of one request that have a mask share
    one prefix, and a node's ancestors stand in lower bits than the node. A request has a mask in
    all of its rows or in none, and requests without come before those with. `adapters` is None
    where no row has one.
    """

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    positions: Tensor
    slots: Tensor
    prefix: Tensor
    mask: Tensor
    adapters: AdapterRows | None = None


@dataclass(slots=True, eq=False)
class KVLayer:
    """One layer's keys and values in every block: strided views of the arena.

    k, v              [num_blocks, block_size, Hk, D]  the last three dimensions contiguous, equal
                                                       strides
    k_scale, v_scale  [num_blocks, block_size, Hk]     float32; in memory [Hk][block_size], equal
                                                       strides. None unless k and v are int8 or
                                                       float8_e4m3fn codes
    native            a build's own form of them, made at their first use
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    native: Any = None

    @property
    def parts(self) -> list[Tensor]:
        """All that a token has here, by block and offset."""
        return [x for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None]


class KVCache(NamedTuple):
    """One model's view of the block arena, a layer at a time."""

    layers: tuple[KVLayer, ...]

    @property
    def block_size(self) -> int:
        return self.layers[0].k.shape[1]


class Rotary(NamedTuple):
    """Cosine and sine by position.

    cos, sin  [P, D/2]  float32  scaled by the rope type's attention factor
    """

    cos: Tensor
    sin: Tensor


class QKNorm(NamedTuple):
    """RMSNorm of every query and key head before the rotation.

    q, k  [D]  float32
    """

    q: Tensor
    k: Tensor
    eps: float


class Edits(NamedTuple):
    """Changes of single logits, in lists that rows may share; host tensors.

    base, own  [n, 2]  int32    the row has the edits [base[0], base[1]), then [own[0], own[1])
    ids        [E]     int32    distinct within each of these ranges
    bias       [E]     float32  -inf rules the id out
    factor     [E]     float32  above 0; 1 is off
    penalty    [E]     float32  0 is off

    An edit makes y = x + bias of its id's logit x, then y / factor if y > 0, else y * factor, and
    then takes the penalty off. Where a row's own edits have an id of its base, they replace that
    edit: so an id gets the same bits whether its token is known or a guess on the row's path.
    """

    base: Tensor
    own: Tensor
    ids: Tensor
    bias: Tensor
    factor: Tensor
    penalty: Tensor


class Masks(NamedTuple):
    """Which ids a row may draw, in masks that rows may share; host tensors.

    number  [n]               int32  0: all ids; else the row's mask is words[number - 1]
    words   [M, ceil(V / 32)]  int32  bit id % 32 of word id // 32 is set where id is allowed
    """

    number: Tensor
    words: Tensor


class SampleParams(NamedTuple):
    """How each of n tokens is chosen; host tensors.

    temperature  [n]  float32  0 is argmax without noise
    top_k        [n]  int32    0 is off
    top_p        [n]  float32  1 is off
    min_p        [n]  float32  0 is off
    seeds        [n]  int64    all 64 bits are the noise's key
    token_index  [n]  int64    the token's place in its request's token_ids
    edits, masks               None where no row has any
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    token_index: Tensor
    edits: Edits | None = None
    masks: Masks | None = None

    @classmethod
    @cache
    def greedy(cls, n: int) -> "SampleParams":
        """Argmax for n tokens. Cached, so never to be written to."""
        zeros, ints = torch.zeros(n), torch.zeros(n, dtype=torch.int64)
        return cls(zeros, ints.int(), torch.ones(n), zeros, ints, ints)

    @classmethod
    def of(
        cls, columns: Iterable[Tensor], edits: Edits | None = None, masks: Masks | None = None
    ) -> "SampleParams":
        """The columns, in order, are the scalars of each row."""
        return cls._make([*columns, edits, masks])

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return self[:6]

    @property
    def is_plain(self) -> bool:
        """Whether no row has edits or a mask."""
        return self.edits is None and self.masks is None

    def tensors(self) -> list[Tensor]:
        return [*self.columns, *(self.edits or ()), *(self.masks or ())]

    def with_tensors(self, tensors: Iterable[Tensor]) -> "SampleParams":
        """Other tensors in the place of `tensors()`, in that order."""
        some = iter(tensors)
        columns = list(islice(some, len(self.columns)))  # before what comes behind them
        edits = None if self.edits is None else Edits(*islice(some, len(self.edits)))
        masks = None if self.masks is None else Masks(*islice(some, len(self.masks)))
        return SampleParams.of(columns, edits, masks)

    def take(self, rows: Tensor | list[int]) -> "SampleParams":
        """The parameters of some rows; lists and masks stay where they are."""
        edits, masks = self.edits, self.masks
        if edits is not None:
            edits = edits._replace(base=edits.base[rows], own=edits.own[rows])
        if masks is not None:
            masks = masks._replace(number=masks.number[rows])
        return SampleParams.of((column[rows] for column in self.columns), edits, masks)


class Logprobs(NamedTuple):
    """What a model says of n tokens, and of the k likeliest in their places; host tensors.

    token  [n]     float32  log softmax of the logits
    rank   [n]     int64    1 + number of ids before the token: those of a greater logit, and of an
                            equal one if they are lower
    ids    [n, k]  int64    those of the ranks 1 to k
    top    [n, k]  float32  their log softmax
    """

    token: Tensor
    rank: Tensor
    ids: Tensor
    top: Tensor


class Threads(Protocol):
    """Called around every forward. A row's result does not depend on the number of threads."""

    def use(self, rows: int) -> None:
        """Set the number for a forward of so many rows."""
        ...

    def observe(self, rows: int, seconds: float) -> None:
        """Record how long the forward took that `use` was last called for."""
        ...

    def is_settled(self, rows: int) -> bool:
        """Whether the number for so many rows will not change."""
        ...


class FixedThreads(NamedTuple):
    """The same number for every step."""

    number: int

    def use(self, rows: int) -> None:
        torch.set_num_threads(self.number)

    def observe(self, rows: int, seconds: float) -> None:
        pass

    def is_settled(self, rows: int) -> bool:
        return True
