"""Structural tags: text that is free but for parts, which begin with a trigger and have a form."""

from typing import Any


def structural_tag(given: dict[str, Any] | str) -> str:
    """The Lark text; GrammarError for what cannot be had."""
    raise NotImplementedError
