"""Calls of drafters, which are user code: what they raise costs guesses, and never any text."""

import logging
import sys

from specserve.exchange.step_output import Stats

log = logging.getLogger("specserve")


def tell(drafter: object, what: str, *args: object) -> None:
    """Call a method of a drafter, if it has it; it may raise anything."""
    method = getattr(drafter, what, None)  # optional in a drafter
    if method is not None:
        method(*args)


class UserCode:
    """Counts and logs what drafters raise."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats

    def tell(self, drafter: object, what: str, *args: object) -> None:
        """Call a method of a drafter, if it has it."""
        try:
            tell(drafter, what, *args)
        except BaseException:  # the rest of the commit has to be done
            self.failed(what)

    def failed(self, where: str) -> None:
        """Count the exception that is being handled, and log it, the first with its traceback."""
        self.stats.drafter_errors += 1
        count = self.stats.drafter_errors
        if count & (count - 1) == 0:  # 1, 2, 4, ...: failures in every step must not fill the log
            message = "the drafter failed in %s (%s), %d times so far; the text does not change"
            log.error(message, where, sys.exception(), count, exc_info=count == 1)
