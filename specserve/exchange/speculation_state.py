"""What speculation goes by at present: sources, limits, costs, calibration and a plan."""

import msgspec


class RowCost(msgspec.Struct, frozen=True):
    """A step of up to so many rows, without what context and requests add."""

    rows: int
    seconds: float
    is_known: bool  # from steps of this size; else estimated from those of others


class CostState(msgspec.Struct, frozen=True):
    """What a model's steps take on this machine."""

    steps: list[RowCost]
    seconds_per_token: float  # of context, once for each request
    seconds_per_row_token: float  # of context, for each row that attends to it
    seconds_per_request: float
    slowdown: float  # by other load, at present: all seconds are to be multiplied by it


class PlainStep(msgspec.Struct, frozen=True):
    """Measured steps of one request without draft tokens, of about the same context."""

    context: int  # tokens; the median
    seconds: float  # of a whole step without the time of drafting; the median
    steps: int  # how many: the latest


class GuessKind(msgspec.Struct, frozen=True):
    """Guesses of one source, with scores close to each other, at one depth from 1."""

    depth: int
    score: float  # on average: the source's own estimate that a guess is right
    right: float  # share that was right
    tries: float  # number of guesses; older ones count for less


class PlanState(msgspec.Struct, frozen=True):
    """The plan of a step that could have guesses."""

    roots: int
    prompt_rows: int
    guesses: int
    rows: int  # of the step: all of these
    tokens: float  # expected
    seconds: float  # expected, drafting included


class SpeculationState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an engine tells of its speculation."""

    sources: tuple[str, ...] = ()
    known_sources: tuple[str, ...] = ()  # all that there have been, by their bits in details
    max_nodes: int = 0  # guesses of a request and step
    max_step_nodes: int = 0  # guesses of a step, over all requests
    costs: dict[str, CostState] = {}  # by model, "target" and "draft"
    plain_steps: list[PlainStep] = []  # by rising context
    tenant: int = 0  # whose requests without a salt `calibration` is learnt from
    calibration: dict[str, list[GuessKind]] = {}  # by source
    plan: PlanState | None = None  # of that tenant's latest step without others' requests
