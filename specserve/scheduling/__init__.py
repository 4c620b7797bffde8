"""Who runs, and with which rows."""

from specserve.scheduling.request import Request, Work
from specserve.scheduling.scheduler import Scheduler

__all__ = ["Request", "Scheduler", "Work"]
