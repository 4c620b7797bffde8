"""Trying again what was not worth its time."""

from collections.abc import Hashable


class Trials:
    """When each of several things is tried again: ever more rarely, as long as it fails."""

    def __init__(self, first: int = 16, last: int = 512) -> None:
        self.first, self.last = first, last
        self.waits: dict[Hashable, tuple[int, int]] = {}  # steps from a trial to the next, and left

    def is_due(self, key: Hashable, steps: int = 1) -> bool:
        """Count steps in which it would be left out; whether it is tried in the last instead."""
        wait, left = self.waits.get(key, (self.first, self.first))
        if left > steps:
            self.waits[key] = wait, left - steps
            return False
        self.waits[key] = (longer := min(2 * wait, self.last)), longer
        return True

    def worked(self, key: Hashable) -> None:
        """It is worth its time: when it no longer is, it is tried again soon."""
        self.waits.pop(key, None)
