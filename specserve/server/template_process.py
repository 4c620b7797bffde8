"""A process that renders chat templates: it can be killed, and its memory is bounded."""

import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import msgspec

from specserve.errors import RequestError
from specserve.exchange.frames import Link
from specserve.models.chat_template import ChatOptions, ChatTemplate
from specserve.process import die_with_parent, return_freed_memory

MAX_MEMORY = 1 << 29  # bytes of address space; Python and jinja2 take an eighth of it
MAX_TEXT = 1 << 24  # characters; every prompt that fits a model is far shorter


class Started(msgspec.Struct, frozen=True, tag=True):
    """The process has started and received its template."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str
    param: str | None = None  # the field that is wrong; None: messages
    is_last: bool = False  # the process ends with this reply


Chat = tuple[list[dict[str, Any]], ChatOptions]
FromProcess = Started | Rendered | Refused


def main(fd: int) -> None:
    """Render until the parent closes its end of the socket."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent handles it, and ends this process
    bound_memory()
    return_freed_memory()
    link = Link(socket.socket(fileno=fd))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(link)


def serve(link: Link) -> None:
    """Receive the template as the first frame; then reply to each frame, which is a chat."""
    [first] = link.receive(wait=True)
    template = msgspec.msgpack.decode(first, type=ChatTemplate)
    link.send(Started())
    template.prepare()
    while True:
        [chat] = link.receive(wait=True)
        try:
            link.send(render(template, *msgspec.msgpack.decode(chat, type=Chat)))
        except (
            MemoryError
        ):  # what the template has built may stay: the next chat gets a new process
            reply = "the chat template needs too much memory for these messages"
            link.send(Refused(reply, is_last=True))
            return


def render(
    template: ChatTemplate, messages: list[dict[str, Any]], options: ChatOptions
) -> Rendered | Refused:
    try:
        text = template.render(messages, options)
        text.encode()
    except RequestError as e:
        return Refused(str(e), e.param)
    except UnicodeError as e:
        return Refused(f"the chat template makes no text of these messages: {e!s:.200}")
    if len(text) > MAX_TEXT:
        return Refused(f"the chat template makes {len(text)} characters of these messages")
    return Rendered(text)


def bound_memory() -> None:
    with suppress(ValueError, OSError):  # a lower limit is set, or limits are unsupported
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


if __name__ == "__main__":
    main(int(sys.argv[1]))
