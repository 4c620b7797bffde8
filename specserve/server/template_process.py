"""The process that renders chat templates."""

from collections.abc import Callable
from typing import Any

import msgspec

from specserve.errors import RequestError
from specserve.server.bounded_process import Do, Done, Refused, bound_memory, main
from specserve.text.chat_template import ChatOptions, ChatTemplate

MAX_TEXT = 1 << 24  # maximum characters; prompts that fit a model are far shorter


def prepare(first: bytes, start: Callable[[], None]) -> Do:
    """Return the function that renders a chat.

    The first frame is the template. Each later frame is a chat.
    """
    bound_memory(1 << 29)  # bytes; Python and jinja2 use an eighth
    template = msgspec.msgpack.decode(first, type=ChatTemplate)
    start()
    template.prepare()
    kind = tuple[list[dict[str, Any]], ChatOptions]
    return lambda chat: render(template, *msgspec.msgpack.decode(chat, type=kind))


def render(
    template: ChatTemplate, messages: list[dict[str, Any]], options: ChatOptions
) -> Done | Refused:
    try:
        text = template.render(messages, options)
        text.encode()
    except RequestError as e:
        return Refused(str(e), e.param)
    except UnicodeError as e:
        return Refused(f"the chat template returns invalid text for these messages: {e!s:.200}")
    if len(text) > MAX_TEXT:
        message = f"the chat template returns {len(text)} characters for these messages"
        return Refused(f"{message}. Send fewer messages")
    return Done(text)


if __name__ == "__main__":
    main(prepare, "the chat template needs too much memory for these messages. Send fewer")
