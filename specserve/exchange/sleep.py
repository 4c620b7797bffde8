"""Sleep, as both processes see it: levels, modes and tags of vLLM, and the state of an engine."""

from collections.abc import Sequence
from typing import Any

import msgspec

from specserve.errors import RequestError

SLEEP_TAGS = "weights", "kv_cache"  # the parts of an engine that sleep
MODES = "abort", "wait", "keep"  # of running requests: end them, wait for them, continue them later
STATES = "awake", "weights_offloaded", "discard_all"  # vLLM's names, by level


class SleepState(msgspec.Struct, frozen=True, tag=True):
    """The parts of an engine whose memory is released."""

    level: int = 0  # 0: awake, 1: weights are kept in host memory, 2: weights are dropped
    tags: tuple[str, ...] = ()  # the parts that sleep
    refusal: str = ""  # why a command failed; empty: it did not


AWAKE = SleepState()


def check_sleep(level: Any, mode: Any) -> None:
    """Raise RequestError for an unknown level or mode."""
    if type(level) is not int or level not in (1, 2):
        raise RequestError(
            f"level: {level!r:.50} is not 1 or 2. 1 keeps the weights in host memory, and 2 drops "
            "them",
            "level",
        )
    if mode not in MODES:
        raise RequestError(f"mode: {mode!r:.50} is unknown. Use {', '.join(MODES)}", "mode")


def checked_tags(tags: Sequence[str] | None) -> list[str]:
    """Return the tags to wake up; None: all. RequestError for an unknown tag, or for none."""
    if tags is None:
        return [*SLEEP_TAGS]
    unknown = [tag for tag in tags if tag not in SLEEP_TAGS]
    if isinstance(tags, str) or not tags or unknown:
        raise RequestError(
            f"tags: {tags!r:.50} must be a list of {' and '.join(SLEEP_TAGS)}. Omit it to wake up "
            "both",
            "tags",
        )
    return [*tags]
