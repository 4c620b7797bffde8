"""The scheduler: which requests run in a step, and with which rows."""

from specserve.scheduling.request import Request, ScheduledRequest
from specserve.scheduling.scheduler import Scheduler

__all__ = ["Request", "ScheduledRequest", "Scheduler"]
