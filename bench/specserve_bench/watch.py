"""Time spent in model operations, apart from everything around them."""

from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from specserve.engine.engine import Engine
from specserve.engine.runner import Runner
from specserve.speculation.draft_model import DraftModel

OPS_AROUND_A_FORWARD = ("sample", "top_children", "move_kv")


class OpClock:
    """Within its `with`, sums the seconds of forwards, sampling and KV moves, for each model."""

    def __init__(self, engine: Engine) -> None:
        self.target: list[Runner] = [engine.target]
        lent = engine.draft_model
        self.draft: list[Runner | DraftModel] = [] if lent is None else [lent.runner, lent]
        self.target_seconds = self.draft_seconds = 0.0
        self.draft_forwards = 0
        self.undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        for runner in self.target:
            self.watch(runner, self.add_target)
        for lent in self.draft:
            self.watch(lent, self.add_draft)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        for undo in self.undo:
            undo()

    def watch(self, part: Runner | DraftModel, add: Callable[[str, float], None]) -> None:
        """Replace the part's operations by timed ones."""
        self.put(part, "ops", Timed(part.ops, OPS_AROUND_A_FORWARD, add))
        if isinstance(part, Runner):
            self.put(part, "program", Timed(part.program, ("run", "logits"), add))

    def put(self, part: Any, name: str, value: Any) -> None:
        before = getattr(part, name)
        self.undo.append(lambda: setattr(part, name, before))
        setattr(part, name, value)

    def add_target(self, name: str, seconds: float) -> None:
        self.target_seconds += seconds

    def add_draft(self, name: str, seconds: float) -> None:
        self.draft_seconds += seconds
        self.draft_forwards += name == "run"


class Timed:
    """Another object's attributes, some of them functions that are timed."""

    def __init__(self, real: Any, names: tuple[str, ...], add: Callable[[str, float], None]):
        self.real, self.names, self.add = real, names, add

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.real, name)
        if name not in self.names:
            return value

        def run(*args: Any) -> Any:
            start = perf_counter()
            result = value(*args)
            self.add(name, perf_counter() - start)
            return result

        return run
