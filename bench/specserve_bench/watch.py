"""Time spent in model operations, told apart from everything around them."""

from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Any

from specserve.engine.engine import Engine
from specserve.models.decoder import Decoder


class OpClock:
    """Within its `with`, sums the seconds of both models' forwards, the sampling and KV moves."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.target_seconds = self.draft_seconds = 0.0
        self.draft_forwards = 0

    def __enter__(self) -> "OpClock":
        watch(self.engine.target.decoder, self.add_target)
        if self.engine.draft_model is not None:
            watch(self.engine.draft_model.runner.decoder, self.add_draft)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        unwatch(self.engine.target.decoder)
        if self.engine.draft_model is not None:
            unwatch(self.engine.draft_model.runner.decoder)

    def add_target(self, name: str, seconds: float) -> None:
        self.target_seconds += seconds

    def add_draft(self, name: str, seconds: float) -> None:
        self.draft_seconds += seconds
        self.draft_forwards += name == "forward"


def watch(decoder: Decoder, add: Callable[[str, float], None]) -> None:
    for name in ("forward", "logits"):
        setattr(decoder, name, timed(getattr(decoder, name), name, add))


def unwatch(decoder: Decoder) -> None:
    for name in ("forward", "logits"):
        delattr(decoder, name)  # the class's own method shows again


def timed(function: Any, name: str, add: Callable[[str, float], None]) -> Any:
    def run(*args: Any) -> Any:
        start = perf_counter()
        result = function(*args)
        add(name, perf_counter() - start)
        return result

    return run
