"""Finds the newest message of a conversation in its text, because prefixes often end before it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

EARLIER = "assistant", "system", "developer"  # roles that come before the newest message
MOST_MISSING = 16  # most messages that a template may have dropped or rewritten


def newest_begin(messages: Sequence[Mapping[str, Any]], text: str) -> int:
    """Return where the content of the newest message begins in the rendered text; 0 if unknown.

    The newest message is the first one after the last response: tools may have sent several.
    Messages are found in order, because an earlier one may have the same content.
    """
    number = len(messages)
    while number > 0 and messages[number - 1].get("role") not in EARLIER:
        number -= 1
    end = num_missing = 0
    for i, message in enumerate(messages):
        for part in contents(message):
            begin = text.find(part, end)
            if begin < 0:
                num_missing += 1
                if num_missing > MOST_MISSING:
                    return 0
            elif i >= number:
                return begin
            else:
                end = begin + len(part)
    return 0


def contents(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message's content, as templates print them."""
    content = message.get("content")
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else [content]
    for part in parts:
        words = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(words, str) and words.strip():
            yield words.strip()
