"""The drafter interface: its input, the draft model lent to it, and finding one by name."""

import importlib
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol

import msgspec
from msgspec import Meta, field

from specserve_drafters.candidates import MAX_NODES, Candidate, Draft

if TYPE_CHECKING:  # a process that only checks a drafter's name and options needs no torch
    from torch import Tensor

    from specserve_kernels import Ops

BUILT_IN = {
    "auto": "specserve_drafters.base:Auto",
    "ngram": "specserve_drafters.ngram:NgramDrafter",
    "model": "specserve_drafters.model:ModelDrafter",
    "eagle": "specserve_drafters.model:ModelDrafter",  # with a head as its model
}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A drafter's own knobs; each drafter file extends it."""


class DraftRequest(msgspec.Struct, frozen=True):
    """What a drafter sees of a request that is due a token."""

    id: int
    known: "array[int]"  # prompt and committed output
    limit: int  # guesses that fit into this step, at least 1
    temperature: float  # of the target's draw; 0 is argmax
    seed: int  # of the noise that the target's draw will use: a draft may use it, too

    def copy(self) -> "DraftRequest":
        """With a history of its own: `known` of a built-in drafter is the request's."""
        return msgspec.structs.replace(self, known=self.known[:])

    @property
    def token_ids(self) -> "array[int]":
        """Prompt and committed output; a copy made at each access, for the drafter to keep."""
        return self.known[:]


class Nodes(NamedTuple):
    """Tokens of one request for the draft model to run, each below the root or an earlier one.

    The nodes of a request are numbered from 1 over all calls of a step, in the order given;
    `parents` holds those numbers, or ROOT.
    """

    id: int
    tokens: list[int]
    parents: list[int]


class Executor(Protocol):
    """A draft model, lent to a drafter for the time of one `propose`."""

    ops: "Ops"
    num_ids: int  # tokens of nodes are below it

    def extend(self, items: Sequence[DraftRequest]) -> "tuple[list[int], Tensor]":
        """Run known tokens that the draft model has not seen.

        -> indices of the items whose known tokens have all been run, and for each of these the
        logits after its last token, [n, V]. Nodes run in earlier steps are forgotten.
        """
        ...

    def expand(self, nodes: Sequence[Nodes]) -> "tuple[list[int], Tensor]":
        """Run one level of guesses, all requests in one forward.

        -> indices of the entries that had room for their KV, and the logits after each of their
        nodes, in order, [n, V].
        """
        ...


class Drafter(Protocol):
    """Guesses what comes next. It can change how fast text comes, never which text.

    A class with `needs_executor = True` is given `executor=` at construction; without the attribute
    it is not. An exception discards the drafts of that step, and nothing else.
    """

    needs_executor: ClassVar[bool]

    def propose(self, items: Sequence[DraftRequest]) -> list[Draft]:
        """A tree for each item, of at most `limit` guesses; it may be empty."""
        ...

    def observe(self, id: int, draft: Draft, accepted: Sequence[int]) -> None:
        """Learn which nodes of a draft were accepted, from the root down."""
        ...

    def forget(self, id: int) -> None:
        """Drop what is kept of a request: it has ended, and its id may be used again."""
        ...


class DraftSource(Protocol):
    """One of several sources, whose guesses are merged into one tree. It sees requests' texts, and
    knows beforehand how many of its guesses are likely to be right.
    """

    name: str

    def expected_accepted(self, id: int, text: "array[int]") -> float: ...

    def candidates(self, items: Sequence[DraftRequest]) -> list[list[Candidate]]: ...

    def forget(self, id: int) -> None: ...

    def reset(self) -> None: ...


class DrafterError(ValueError):
    """A drafter cannot be found, or cannot be made with its options."""


# What other engines call methods that are one drafter here, and what to do.
HEADS = dict.fromkeys(("eagle3", "mtp"), "heads of the target, EAGLE-3 and MTP, guess as 'eagle'")

# Errors of user code. SystemExit is one, so that a sys.exit() in it does not end the engine.
ANYTHING = (Exception, SystemExit)


def find_drafter(name: str) -> Any:
    """The class behind a built-in name or `package.module:Class`."""
    module, _, attribute = BUILT_IN.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ANYTHING as e:
        if name in HEADS:
            raise DrafterError(f"no drafter {name!r}: {HEADS[name]}") from e
        if name in ("grammar", "prediction", "suffix"):
            raise DrafterError(
                f"no drafter {name!r}: it is a source; take drafter.name = 'auto', and name it in "
                "drafter.options.sources, as configs/suffix.toml does"
            ) from e
        known = ", ".join(("none", *BUILT_IN))
        raise DrafterError(
            f"no drafter {name!r} ({reason(e)}); built in: {known}; others as "
            "package.module:Class, installed or with their folder on PYTHONPATH"
        ) from e
    if not isinstance(found, type):
        raise DrafterError(f"drafter {name!r} is no class, but of type {type(found).__name__}")
    return found


def find_source(name: str) -> Any:
    """The class of a user's drafter that is one of the sources of `auto`."""
    if name in HEADS:
        raise DrafterError(f"drafter.options.sources: no source {name!r}: {HEADS[name]}")
    if name in BUILT_IN or ":" not in name:
        raise DrafterError(
            f"drafter.options.sources: no source {name!r}; there are ngram, model, eagle, "
            "grammar, prediction, suffix, recycle and package.module:Class"
        )
    cls = find_drafter(name)
    if not any(callable(getattr(cls, method, None)) for method in ("propose", "candidates")):
        raise DrafterError(f"drafter {name!r} has neither a method `propose` nor `candidates`")
    return cls


def find_proposer(name: str) -> Any:
    """The class of a drafter that is alone."""
    cls = find_drafter(name)
    if name != "auto" and not callable(getattr(cls, "propose", None)):
        raise DrafterError(
            f"drafter {name!r} has no method `propose`; one that has `candidates` only is named in "
            "drafter.options.sources of drafter auto"
        )
    return cls


def drafter_options(name: str, options: Mapping[str, Any]) -> Any:
    """The options as the drafter's own struct, checked."""
    cls = find_drafter(name)
    try:
        return msgspec.convert(options, cls.Options)
    except ANYTHING as e:
        struct = getattr(cls, "Options", None)
        known = ", ".join(getattr(struct, "__struct_fields__", ()))
        words = f"; it has {known}" if known else ""
        raise DrafterError(f"drafter.options for {name!r}: {reason(e)}{words}") from e


def make_drafter(
    name: str,
    options: Mapping[str, Any],
    executor: Executor | None = None,
    is_source: bool = False,
) -> Drafter:
    """A drafter that is alone, or one of the sources of `auto`."""
    knobs = drafter_options(name, options)
    cls = find_source(name) if is_source else find_proposer(name)
    lent = {"executor": executor} if getattr(cls, "needs_executor", False) else {}
    if lent and executor is None:
        raise DrafterError(f"drafter {name!r} needs a draft model: set drafter.model")
    try:
        drafter: Drafter = cls(knobs, **lent)
    except ANYTHING as e:
        raise DrafterError(f"drafter {name!r} cannot be made: {reason(e)}") from e
    return drafter


def reason(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}"


EAGLE = "eagle"  # the source that is a head of the target
USUAL = "ngram", "model", EAGLE, "grammar", "prediction"
AUTO_SOURCES = *USUAL, "suffix", "recycle"


class AutoOptions(Options, frozen=True):
    # ngram, model (where there is a draft model), eagle (where there is a head), grammar,
    # prediction, suffix, recycle, and drafters as package.module:Class
    sources: Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] = USUAL
    # of the drafters among them, by these names
    source_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    max_depth: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 16  # levels of a model
    width: Annotated[int, Meta(ge=1, le=16)] = 4  # nodes run a level, and children a node
    tau: Annotated[float, Meta(gt=0, le=4)] = 1.0  # see Ops.top_children


class Auto:
    """The options of the sources that the engine asks and plans by itself."""

    Options = AutoOptions
