"""Drafters propose trees of draft tokens from token histories."""

from specserve_drafters.base import (
    Drafter,
    DrafterError,
    DraftRequest,
    Executor,
    Nodes,
    make_drafter,
)
from specserve_drafters.candidates import ROOT, Draft

__all__ = [
    "ROOT",
    "Draft",
    "DraftRequest",
    "Drafter",
    "DrafterError",
    "Executor",
    "Nodes",
    "make_drafter",
]
