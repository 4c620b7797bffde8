"""The drafter interface: its input, access to the draft model, and lookup by name."""

import importlib
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol

import msgspec
from msgspec import Meta, field

from specserve_drafters.candidates import MAX_NODES, Candidate, Draft, Rules
from specserve_drafters.trie import AcceptancePrior, BaseTrie

if TYPE_CHECKING:  # a process that only checks a drafter's name and options needs no torch
    from torch import Tensor

    from specserve_kernels import Ops

BUILT_IN = {
    "auto": "specserve_drafters.base:Auto",
    "ngram": "specserve_drafters.ngram:NgramDrafter",
    "model": "specserve_drafters.model:ModelDrafter",
    "eagle": "specserve_drafters.model:ModelDrafter",  # runs a head of the target
}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A drafter's options; each drafter extends this struct."""


class DraftRequest(msgspec.Struct, frozen=True):
    """A drafter's view of a request that needs its next token."""

    id: int
    known: "array[int]"  # prompt and committed output
    limit: int  # most draft tokens for this step, at least 1
    temperature: float  # temperature of the target's sampling; 0 is argmax
    seed: int  # seed of the target's sampling noise: a drafter may use it, too

    def copy(self) -> "DraftRequest":
        """Copy the request with its history: `known` of a built-in drafter is the request's own
        array.
        """
        return msgspec.structs.replace(self, known=self.known[:])

    @property
    def token_ids(self) -> "array[int]":
        """Return prompt and committed output; each access makes a copy that the drafter may
        keep.
        """
        return self.known[:]


class Nodes(NamedTuple):
    """Tokens of one request for the draft model to run, each below the root or an earlier node.

    The nodes of a request are numbered from 1 over all calls of a step, in the order given;
    `parents` holds those numbers, or ROOT.
    """

    id: int
    tokens: list[int]
    parents: list[int]


class Executor(Protocol):
    """Access to a draft model during one `propose`."""

    ops: "Ops"
    num_ids: int  # ids of nodes are below it

    def extend(self, items: Sequence[DraftRequest]) -> "tuple[list[int], Tensor]":
        """Run known tokens that the draft model has not run.

        -> indices of the items whose known tokens have all been run, and for each of these the
        logits after its last token, [n, V]. Nodes of earlier steps are dropped.
        """
        ...

    def expand(self, nodes: Sequence[Nodes]) -> "tuple[list[int], Tensor]":
        """Run one level of draft tokens, all requests in one forward.

        -> indices of the entries whose KV had room, and the logits after each of their nodes, in
        order, [n, V].
        """
        ...


class Drafter(Protocol):
    """Proposes draft tokens. It can change how fast text comes, never which text.

    A class with `needs_executor = True` gets `executor=` at construction; other classes do not. An
    exception only discards the drafts of its step.
    """

    needs_executor: ClassVar[bool]

    def propose(self, items: Sequence[DraftRequest]) -> list[Draft]:
        """Return a tree for each item, of at most `limit` draft tokens; it may be empty."""
        ...

    def observe(self, id: int, draft: Draft, accepted: Sequence[int]) -> None:
        """Learn which nodes of a draft were accepted, from the root down."""
        ...

    def forget(self, id: int) -> None:
        """Drop the state of a request: it has ended, and its id may be used again."""
        ...


TenantScope = tuple[int, str, str]  # tenant, salt, digest of the adapter
DEFAULT_SCOPE = 0, "", ""  # scope of requests without a key, a salt and an adapter


class SourceRequest(msgspec.Struct, frozen=True):
    """What draft sources may know about a request, from its begin to its end."""

    id: int
    known: "array[int]"  # prompt and committed output; it grows with the request
    num_prompt: int
    scope: TenantScope = DEFAULT_SCOPE  # what a source learns must not reach other scopes
    prediction: Sequence[int] = ()  # the output that the caller expects; empty: none
    is_learnt: bool = True  # sources may learn from its output


class DraftSource:
    """One of several sources whose draft tokens are merged into one tree.

    A source states as data what it needs and can do, and overrides the methods for that. Others do
    nothing. The speculator treats all sources alike.
    """

    name: str
    is_estimating: ClassVar[bool] = False  # has `expected_accepted`
    needs_rules: ClassVar[bool] = False  # serves only requests with a grammar, by `constrain`
    needs_prediction: ClassVar[bool] = False  # serves only requests with a prediction
    learns_drafts: ClassVar[bool] = False  # has `observe`
    extends_paths: ClassVar[bool] = False  # continues paths of other sources by `extend`
    num_successors: ClassVar[int] = 0  # likely next tokens that it wants from the target's logits
    address: int = 0  # of the source in C++, if it is there: plans.cpp asks it

    def begin(self, request: SourceRequest) -> None:
        """Propose for a request until `forget`."""

    def serving(self, id: int) -> "DraftSource":
        """Return the source that has the statistics of a request, until `reset`."""
        return self

    def expected_accepted(self, id: int, text: "array[int]") -> float:
        """Return the expected number of accepted draft tokens, in far less time than proposing."""
        return 0.0

    def expected_of_each(self, texts: "Sequence[tuple[int, array[int]]]") -> list[float]:
        """Return it for several requests, each an id and its text."""
        return [self.expected_accepted(id, text) for id, text in texts]

    def candidates(self, items: Sequence[DraftRequest]) -> Sequence[Sequence[Candidate]]:
        """Return the candidates of each item: draft tokens with the probability that each is
        accepted if its parent is.
        """
        raise NotImplementedError

    def add_candidates(self, items: Sequence[DraftRequest], tries: Sequence[BaseTrie]) -> list[int]:
        """Add the candidates of each item to its trie; return their numbers."""
        each = [*zip(tries, self.candidates(items), strict=True)]
        for trie, found in each:
            trie.merge(found)
        return [len(found) for _, found in each]

    def constrain(self, id: int, rules: Rules) -> None:
        """Take the grammar of a request, in every step."""

    def extend(self, trie: BaseTrie, item: DraftRequest, proposed: dict[str, int]) -> None:
        """Add continuations of paths to a request's candidates, and their number to `proposed`."""

    def wanted_successors(self, id: int, tokens: Sequence[int]) -> list[int]:
        """Learn from consecutive tokens of a text. Return places of tokens whose likely successors
        it wants.
        """
        return []

    def enter_successors(self, id: int, token: int, ids: Sequence[int], p: Sequence[float]) -> None:
        """Learn a token's likely successors, most likely first, and their probabilities."""

    def observe(self, id: int, draft: Draft, accepted: Sequence[int]) -> None:
        """Learn which nodes of a draft of all sources were accepted, from the root down."""

    def forget(self, id: int) -> None:
        """Drop the state of a request: it has ended, and its id may be used again."""

    def reset(self) -> None:
        """Drop all that was learned from texts."""


class DrafterError(ValueError):
    """A drafter is unknown, or its options are invalid."""


# Other engines' names of methods that are one drafter here, and what to do.
HEADS = dict.fromkeys(("eagle3", "mtp"), "use 'eagle' for EAGLE-3 and MTP heads")

# Errors of user code. They include SystemExit, so that a sys.exit() does not end the engine.
ANYTHING = (Exception, SystemExit)


def find_drafter(name: str) -> Any:
    """Return the class of a built-in name or of `package.module:Class`."""
    module, _, attribute = BUILT_IN.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ANYTHING as e:
        if name in HEADS:
            raise DrafterError(f"Unknown drafter {name!r}: {HEADS[name]}") from e
        if name in SOURCES and name not in BUILT_IN:
            raise DrafterError(
                f"{name!r} is a draft source, not a drafter. Use drafter.name = 'auto', and add it "
                "to drafter.options.sources, as in configs/suffix.toml"
            ) from e
        known = ", ".join(("none", *BUILT_IN))
        raise DrafterError(
            f"Unknown drafter {name!r} ({reason(e)}). Choose one of {known}, or "
            "package.module:Class that is installed or whose folder is on PYTHONPATH"
        ) from e
    if not isinstance(found, type):
        raise DrafterError(f"Drafter {name!r} is of type {type(found).__name__}. Name a class")
    return found


def find_source(name: str) -> Any:
    """Return the class of a user's drafter that is a source of `auto`."""
    if name in HEADS:
        raise DrafterError(f"drafter.options.sources: unknown source {name!r}: {HEADS[name]}")
    if name in BUILT_IN or ":" not in name:
        raise DrafterError(
            f"drafter.options.sources: unknown source {name!r}. Choose from "
            f"{', '.join(AUTO_SOURCES)} and package.module:Class"
        )
    cls = find_drafter(name)
    if not any(callable(getattr(cls, method, None)) for method in ("propose", "candidates")):
        raise DrafterError(f"Drafter {name!r} has no method `propose` or `candidates`. Add one")
    return cls


def find_proposer(name: str) -> Any:
    """Return the class of a drafter that runs as the only one."""
    cls = find_drafter(name)
    if name != "auto" and not callable(getattr(cls, "propose", None)):
        raise DrafterError(
            f"Drafter {name!r} has no method `propose`. If it has `candidates`, use drafter auto "
            "and add it to drafter.options.sources"
        )
    return cls


def drafter_options(name: str, options: Mapping[str, Any]) -> Any:
    """Return the checked options as the drafter's struct."""
    cls = find_drafter(name)
    try:
        return msgspec.convert(options, cls.Options)
    except ANYTHING as e:
        struct = getattr(cls, "Options", None)
        known = ", ".join(getattr(struct, "__struct_fields__", ()))
        words = f". Available options: {known}" if known else ""
        raise DrafterError(f"drafter.options for {name!r}: {reason(e)}{words}") from e


def make_drafter(
    name: str,
    options: Mapping[str, Any],
    executor: Executor | None = None,
    is_source: bool = False,
) -> Drafter:
    """Create a drafter that runs as the only one, or a source of `auto`."""
    knobs = drafter_options(name, options)
    cls = find_source(name) if is_source else find_proposer(name)
    kwargs = {"executor": executor} if getattr(cls, "needs_executor", False) else {}
    if kwargs and executor is None:
        raise DrafterError(f"Drafter {name!r} needs a draft model. Set drafter.model")
    try:
        drafter: Drafter = cls(knobs, **kwargs)
    except ANYTHING as e:
        raise DrafterError(f"Drafter {name!r} failed at construction: {reason(e)}") from e
    return drafter


def reason(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}"


EAGLE = "eagle"  # the source that is a head of the target
USUAL = "ngram", "model", EAGLE, "grammar", "prediction"
# Sources of `auto` that run no model: a new one needs its file, and a line here.
SOURCES = {
    "ngram": "specserve_drafters.native:ngram_sources",
    "grammar": "specserve_drafters.grammar:GrammarSource",
    "prediction": "specserve_drafters.prediction:PredictionSource",
    "suffix": "specserve_drafters.native:suffix_source",
    "recycle": "specserve_drafters.recycle:RecycleSource",
}
AUTO_SOURCES = *USUAL, *(name for name in SOURCES if name not in USUAL)


def make_source(name: str) -> DraftSource:
    """Create one of SOURCES."""
    module, _, attribute = SOURCES[name].partition(":")
    source: DraftSource = getattr(importlib.import_module(module), attribute)()
    return source


def make_calibration(prior: AcceptancePrior | None = None) -> Any:
    """Return a `native.NativeCalibration`. BuildError if there is no compiled library."""
    return importlib.import_module("specserve_drafters.native").NativeCalibration(prior)


class AutoOptions(Options, frozen=True):
    # Sources: ngram, model (if there is a draft model), eagle (if there is a head), grammar,
    # prediction, suffix, recycle, and drafters as package.module:Class.
    sources: Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] = USUAL
    # options of the drafters among the sources, by name
    source_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    max_depth: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 16  # most levels of a model
    width: Annotated[int, Meta(ge=1, le=16)] = 4  # most nodes per level, and children per node
    tau: Annotated[float, Meta(gt=0, le=4)] = 1.0  # see Ops.top_children


class Auto:
    """The options of drafter `auto`, whose sources the engine runs and plans."""

    Options = AutoOptions
