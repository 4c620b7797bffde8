"""A request's text state: how its text changes the logits of the next token, per tree node."""

from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from functools import reduce
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.exchange.sampling_params import Sampling
from specserve.scheduling.grammar_state import GrammarState
from specserve.scheduling.reasoning_state import ReasoningState, state_after_prompt
from specserve_drafters import ROOT, Draft
from specserve_kernels import Edits, Masks

MOST_OF_WORD = 64  # most tokens of a bad word
BAN = (float("-inf"), 1.0, 0.0)

Edit = tuple[float, float, float]  # bias, factor, penalty: see Edits


class EditColumns(NamedTuple):
    """Edits of some ids, in the form that the ops take."""

    ids: "array[int]"
    bias: "array[float]"
    factor: "array[float]"
    penalty: "array[float]"

    def append(self, token: int, edit: Edit) -> None:
        self.ids.append(token)
        for column, value in zip(self[1:], edit, strict=True):
            column.append(value)

    def put(self, place: int, edit: Edit) -> None:
        for column, value in zip(self[1:], edit, strict=True):
            column[place] = value

    def join(self, others: "EditColumns") -> None:
        self.ids.extend(others.ids)
        for column, other in zip(self[1:], others[1:], strict=True):
            column.extend(other)

    def extend(self, nodes: "list[dict[int, Edit]]") -> None:
        """Append the edits of several nodes."""
        self.ids.extend([token for edits in nodes for token in edits])
        each = [edit for edits in nodes for edit in edits.values()]
        for column, values in zip(self[1:], zip(*each, strict=True), strict=False):
            column.extend(values)  # zip has no values without edits


def no_edits() -> EditColumns:
    return EditColumns(array("i"), array("f"), array("f"), array("f"))


def equal_edits(tokens: Collection[int], edit: Edit) -> EditColumns:
    return EditColumns(array("i", tokens), *(array("f", [value]) * len(tokens) for value in edit))


NOTHING = no_edits()


class NodeEdits(NamedTuple):
    """A node's edits: its own by id, then edits of other ids, which nodes share."""

    edits: dict[int, Edit]
    others: EditColumns

    def __len__(self) -> int:
        return len(self.edits) + len(self.others.ids)


NO_OWN = NodeEdits({}, NOTHING)


class Ends:
    """Last tokens of words, by the tokens before them. The time to find words does not depend on
    their number.
    """

    def __init__(self) -> None:
        # Keys: the last of the tokens before, the number of tokens before, and these tokens.
        self.lasts: dict[int, dict[int, dict[tuple[int, ...], list[int]]]] = {}

    def add(self, word: tuple[int, ...]) -> None:
        begin, last = word[:-1], word[-1]
        by_size = self.lasts.setdefault(begin[-1], {})
        by_size.setdefault(len(begin), {}).setdefault(begin, []).append(last)

    def after(self, text: Sequence[int]) -> Iterator[int]:
        """Return the tokens that would complete a word."""
        for size, lasts in self.lasts.get(text[-1], {}).items() if text else ():
            yield from lasts.get(tuple(text[-size:]), ())


class TextState:
    """Follows a request's text: `extend` adds new tokens; `advance` and `undo` move along a path of
    draft tokens.

    The edits of the known text persist between steps, and a token changes one of them. `edit`
    computes the edits of draft tokens and known tokens alike.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        vocab_size: int,
        grammar: GrammarState | None = None,
    ) -> None:
        self.sampling, self.grammar = sampling, grammar
        self.bias = dict(sampling.logit_bias)
        self.bias |= {word[0]: BAN[0] for word in sampling.bad_words if len(word) == 1}
        self.words = Ends()
        for word in sampling.bad_words:
            if len(word) > 1:
                self.words.add(word)
        # Edits that forbid an end before min_tokens.
        self.early = equal_edits(sampling.stop_ids if sampling.min_tokens else (), BAN)
        self.output: list[int] = []  # output tokens, and tokens of the path
        self.counts: Counter[int] = Counter()
        self.has_penalties = sampling.has_penalties
        self.prompt = frozenset(prompt if sampling.repetition_penalty != 1 else ())
        tokens = sorted({*self.bias, *self.prompt})
        self.places = dict(zip(tokens, range(len(tokens)), strict=True))
        self.base = equal_edits(tokens, (0.0, 1.0, 0.0))
        self.base.bias[:] = array("f", [self.bias.get(t, 0.0) for t in tokens])
        if self.prompt:
            factors = [sampling.repetition_penalty if t in self.prompt else 1.0 for t in tokens]
            self.base.factor[:] = array("f", factors)
        self.mask, self.vocab_size = mask_of(sampling.allowed_ids, vocab_size), vocab_size
        self.reasoning: ReasoningState | None = None  # after the known text
        if sampling.reasoning is not None:
            self.reasoning = state_after_prompt(prompt, sampling.reasoning)

    def fork(self) -> "TextState":
        """Return the state of another completion, before any output. Copying edits is faster than
        making them.
        """
        other = copy(self)
        other.output, other.counts = [], Counter()
        other.base, other.places = no_edits(), dict(self.places)
        other.base.join(self.base)
        other.grammar = self.grammar and self.grammar.fork()
        return other

    def edit(self, token: int) -> Edit:
        asked, count = self.sampling, self.counts[token]
        factor = asked.repetition_penalty if count or token in self.prompt else 1.0
        penalty = asked.frequency_penalty * count + (asked.presence_penalty if count else 0.0)
        return self.bias.get(token, 0.0), factor, penalty

    def keep(self, token: int) -> None:
        """Store a token's edit in the edits of the known text."""
        place = self.places.setdefault(token, len(self.base.ids))
        if place == len(self.base.ids):
            self.base.append(token, self.edit(token))
        else:
            self.base.put(place, self.edit(token))

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.advance(token)
        for token in set(tokens) if self.has_penalties else ():
            self.keep(token)
        if self.grammar is not None:
            self.grammar.extend(tokens)
        if self.reasoning is not None:
            self.reasoning = self.reasoning_after(tokens)

    def reasoning_after(self, path: Sequence[int]) -> ReasoningState:
        """Return the position in the reasoning after a path of tokens."""
        state, budget = self.reasoning, self.sampling.reasoning
        assert state is not None and budget is not None, "only for requests with a budget"
        for token in path:
            state = state.after(token, budget)
        return state

    def advance(self, token: int) -> None:
        self.output.append(token)
        self.counts[token] += 1

    def undo(self) -> None:
        self.counts[self.output.pop()] -= 1

    @property
    def is_early(self) -> bool:
        return len(self.output) < self.sampling.min_tokens

    def reasoning_mask(self, path: Sequence[int]) -> NDArray[np.int32] | None:
        """Return the ids that the budget of reasoning allows after a path; None: all."""
        budget = self.sampling.reasoning
        if budget is None:
            return None
        return self.reasoning_after(path).mask(budget, self.vocab_size)

    def has_mask_after(self, path: Sequence[int]) -> bool:
        """Return whether the allowed ids after a path may differ from those of other nodes."""
        return self.grammar is not None or self.reasoning_mask(path) is not None

    def mask_after(self, path: Sequence[int]) -> Tensor:
        """Return the ids that grammar, budget and mask allow after a path of draft tokens.

        The budget waits while the grammar forbids what it asks for: a character may be incomplete.
        """
        budget, grammar = self.reasoning_mask(path), None
        if self.grammar is not None:
            grammar = self.grammar.mask(path)
            if budget is not None and not (budget & grammar).any():
                budget = None
        each = [None if self.mask is None else self.mask.numpy(), budget, grammar]
        return torch.from_numpy(reduce(np.bitwise_and, [w for w in each if w is not None]))

    def own(self, path: dict[int, Edit]) -> NodeEdits:
        """Return the edits at a path's end; they forbid tokens that complete a bad word or end too
        early.
        """
        edits = path | dict.fromkeys(self.words.after(self.output), BAN)
        if not self.is_early:
            return NodeEdits(edits, NOTHING)
        stops = self.sampling.stop_ids
        return NodeEdits({t: e for t, e in edits.items() if t not in stops}, self.early)

    def each(self, draft: Draft) -> list[NodeEdits]:
        """Return the edits of the root and every draft token; they extend or replace edits of the
        known text.
        """
        below: list[list[int]] = [[] for _ in range(1 + len(draft))]
        for node, parent in enumerate(draft.parents, 1):
            below[parent].append(node)
        edits = [NO_OWN] * len(below)

        def visit(node: int, path: dict[int, Edit]) -> None:
            edits[node] = self.own(path)
            for child in below[node]:
                token = draft.tokens[child - 1]
                self.advance(token)
                visit(child, path | {token: self.edit(token)} if self.has_penalties else path)
                self.undo()

        visit(ROOT, {})
        return edits


def mask_of(ids: Sequence[int] | None, vocab_size: int) -> Tensor | None:
    if ids is None:
        return None
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


def edits_of(states: Sequence[TextState | None], drafts: Sequence[Draft]) -> Edits | None:
    """Return the edits after the root and every draft token of each request, request by request."""
    every, base, own = no_edits(), array("i"), array("i")
    for state, draft in zip(states, drafts, strict=True):
        begin = len(every.ids)
        if state is not None:
            every.join(state.base)
        nodes = [NO_OWN] * (1 + len(draft)) if state is None else state.each(draft)
        base.extend([begin, len(every.ids)] * len(nodes))
        ends = [*accumulate(map(len, nodes), initial=len(every.ids))]
        own.extend(chain.from_iterable(pairwise(ends)))
        if any(node.others.ids for node in nodes):
            for node in nodes:
                every.extend([node.edits])
                every.join(node.others)
        else:
            every.extend([node.edits for node in nodes])
    if not every.ids:
        return None
    ranges = [torch.from_numpy(np.frombuffer(x, np.int32)).view(-1, 2) for x in (base, own)]
    ids = torch.from_numpy(np.frombuffer(every.ids, np.int32))
    return Edits._make(
        [*ranges, ids, *(torch.from_numpy(np.frombuffer(x, np.float32)) for x in every[1:])]
    )


class NodeMask(NamedTuple):
    """A node's mask by its request's grammar; it is computed when the node is read."""

    state: TextState
    path: list[int]  # the tokens from the root to the node, without the root's

    def words(self) -> Tensor:
        return self.state.mask_after(self.path)


def node_masks_of(
    states: Sequence[TextState | None], drafts: Sequence[Draft]
) -> dict[int, NodeMask]:
    """Return masks by row, for requests with a grammar or a budget of reasoning."""
    masks: dict[int, NodeMask] = {}
    row = 0
    for state, draft in zip(states, drafts, strict=True):
        if state is not None and (state.grammar or state.reasoning) is not None:
            paths: list[list[int]] = [[]]
            for token, parent in zip(draft.tokens, draft.parents, strict=True):
                paths.append([*paths[parent], token])
            masks |= {
                row + node: NodeMask(state, path)
                for node, path in enumerate(paths)
                if state.has_mask_after(path)
            }
        row += 1 + len(draft)
    return masks


def masks_of(states: Sequence[TextState | None], drafts: Sequence[Draft]) -> Masks | None:
    """Return the masks after the root and every draft token of requests without a grammar. All
    nodes of a request share one mask.
    """
    masks: list[Tensor] = []
    numbers = array("i")
    for state, draft in zip(states, drafts, strict=True):
        if state is not None and state.mask is not None and state.grammar is None:
            masks.append(state.mask)
            numbers.extend([len(masks)] * (1 + len(draft)))
        else:
            numbers.extend([0] * (1 + len(draft)))
    if not masks:
        return None
    return Masks(torch.from_numpy(np.frombuffer(numbers, np.int32)), torch.stack(masks))
