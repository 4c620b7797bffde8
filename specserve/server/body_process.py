"""The process that reads large request bodies."""

import os
from collections.abc import Callable
from contextlib import suppress

import msgspec

from specserve.errors import RequestError
from specserve.server.body import BodyKind, check_items
from specserve.server.bounded_process import (
    Data,
    Do,
    Refused,
    address_space,
    bound_memory,
    bounded_time,
    main,
)
from specserve.server.chat import CHAT
from specserve.server.completions import COMPLETION
from specserve.server.messages import MESSAGES
from specserve.server.responses import RESPONSES
from specserve.server.texts import DETOKENIZE, TOKENIZE

KINDS = {kind.name: kind for kind in (CHAT, COMPLETION, MESSAGES, RESPONSES, TOKENIZE, DETOKENIZE)}


def prepare(first: bytes, start: Callable[[], None]) -> Do:
    """Return the function that reads a body.

    The first frame is the maximum number of items. Each later frame is a kind's name and a body.
    """
    with suppress(OSError):
        os.nice(10)  # engine steps have priority
    most = msgspec.msgpack.decode(first, type=int)
    bound_memory(address_space() + (1 << 29))
    start()
    return lambda frame: read(most, *msgspec.msgpack.decode(frame, type=tuple[str, bytes]))


def read(most: int, name: str, raw: bytes) -> Data | Refused:
    kind: BodyKind[object] = KINDS[name]  # type: ignore[assignment]
    try:
        with bounded_time(2.0):
            check_items(raw, most)
            return Data(msgspec.json.encode(kind.read(raw)))
    except RequestError as e:
        return Refused(str(e), e.param, e.code)


if __name__ == "__main__":
    main(prepare, "reading the body needs too much memory. Send a smaller body")
