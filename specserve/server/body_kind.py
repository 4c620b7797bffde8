"""What a route reads of a body, and the limit on a body's items."""

import re
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from specserve.errors import RequestError

T = TypeVar("T")
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
LARGE = 1 << 15  # bytes from which reading a body takes a few milliseconds
MANY = 100  # items from which reading a body takes a few milliseconds


class BodyKind(NamedTuple, Generic[T]):
    """How a route's bodies are read. What `read` returns is sent between processes as JSON."""

    name: str
    read: Callable[[bytes], T]
    result: Any  # the type that `read` returns


def is_short(raw: bytes) -> bool:
    """Whether the event loop may read it."""
    return len(raw) <= LARGE and num_brackets(raw) <= MANY


def check_items(raw: bytes, most: int) -> None:
    """RequestError for a body with more objects and lists than `most`. Reading takes time for each
    of them, and decoding some ten times as long as counting.
    """
    if num_brackets(raw) <= most:
        return
    if (found := num_brackets(STRING.sub(b"", raw))) > most:
        raise RequestError(
            f"the body has {found} objects and lists, and {most} are allowed: send fewer "
            "messages, parts or tools (server.max_body_items)"
        )


def num_brackets(raw: bytes) -> int:
    """The objects and lists of a body, and the brackets in its texts."""
    return raw.count(b"{") + raw.count(b"[")
