"""When the events of a stream go out, and how large they are: `server.stream_flush`."""

import asyncio
import math
import secrets
from collections.abc import Iterator, Sequence

import msgspec

from specserve.config import ServerConfig
from specserve.server.live_completion import ChoiceDelta, LiveCompletion, Steps, StepWriter

COMMENT = b": waiting\n\n"
SIZE = 256  # bytes, of which padded events have a multiple
LEAST = 2 * SIZE  # with room for the usual text of an event: most have this size
ROOM = 96  # bytes of text that fit into it; what comes faster waits for the next event


class Tokens(Steps):
    """An event for each token, though all of a step come together."""

    async def wait(self) -> list[ChoiceDelta]:
        return [each for delta in await super().wait() for each in tokens_of(delta)]


class Interval:
    """Events at a fixed interval from the stream's beginning, whether anything has come or not."""

    is_padded = True

    def __init__(self, completion: LiveCompletion, seconds: float) -> None:
        self.completion, self.seconds = completion, seconds
        self.loop = asyncio.get_running_loop()
        self.begun_at, self.number = self.loop.time(), 0
        self.ended = set[int]()  # choices
        self.waiting = list[ChoiceDelta]()  # tokens that are written later

    @property
    def is_behind(self) -> bool:
        """Whether something has come that is not written yet."""
        return bool(self.waiting)

    async def wait(self) -> list[ChoiceDelta]:
        """What has come until the next time and has room: of each choice, all in one."""
        passed = math.floor((self.loop.time() - self.begun_at) / self.seconds)
        self.number = max(self.number, passed) + 1  # a client that reads slowly may miss some
        await asyncio.sleep(self.begun_at + self.number * self.seconds - self.loop.time())
        self.waiting += [each for delta in self.completion.taken() for each in tokens_of(delta)]
        taken, self.waiting = with_room(self.waiting)
        return list(merged(taken).values())

    def write(self, writer: StepWriter, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        """An event for each choice that has not ended; an empty one if there is nothing to tell."""
        come, events = {delta.choice: delta for delta in deltas}, list[bytes]()
        for choice in range(len(self.completion.generations)):
            delta = come.get(choice)
            told = [] if delta is None else writer.step([delta])
            if choice not in self.ended:
                events += told or [writer.idle(choice)]
            if delta is not None and delta.is_last:
                self.ended.add(choice)
        return events


def flush_of(limits: ServerConfig, completion: LiveCompletion) -> Tokens | Interval:
    """Where events are not those of steps."""
    if limits.stream_flush == "interval":
        return Interval(completion, limits.stream_interval_ms / 1e3)
    return Tokens(completion, limits.comment_seconds)


def tokens_of(delta: ChoiceDelta) -> Iterator[ChoiceDelta]:
    """A step as one part for each token; the last has what is told of all of the step."""
    if len(delta.token_ids) < 2:
        yield delta
        return
    ends = [0, *delta.ends[: len(delta.token_ids) - 1], len(delta.text)]
    last = len(delta.token_ids) - 1
    for number, token in enumerate(delta.token_ids):
        yield ChoiceDelta(
            delta.choice,
            delta.text[ends[number] : ends[number + 1]],
            delta.begin + number,
            [token],
            delta.is_last and number == last,
            delta.details if number == last else (),
        )


def with_room(
    tokens: Sequence[ChoiceDelta],
) -> tuple[list[ChoiceDelta], list[ChoiceDelta]]:
    """Those whose text has room in an event of their choice, at least one of each, and the rest."""
    taken, rest, held = list[ChoiceDelta](), list[ChoiceDelta](), dict[int, int]()
    for each in tokens:
        size = held.get(each.choice, 0) + len(msgspec.json.encode(each.text)) - 2
        has_room = size <= ROOM or each.choice not in held
        held[each.choice] = size if has_room else ROOM + 1  # the order stays
        (taken if has_room else rest).append(each)
    return taken, rest


def merged(deltas: Sequence[ChoiceDelta]) -> dict[int, ChoiceDelta]:
    """By choice, all that has been added to it as one."""
    all = dict[int, ChoiceDelta]()
    for new in deltas:
        old = all.get(new.choice)
        all[new.choice] = new if old is None else joined(old, new)
    return all


def joined(old: ChoiceDelta, new: ChoiceDelta) -> ChoiceDelta:
    return old._replace(
        text=old.text + new.text,
        token_ids=old.token_ids + new.token_ids,
        is_last=new.is_last,
        details=[*old.details, *new.details],
        ends=(),
    )


def padded(event: bytes) -> bytes:
    """An event with OpenAI's field `obfuscation`, or a comment, of a multiple of SIZE bytes and
    LEAST or more.
    """
    if event.endswith(b"}\n\n"):
        begin, end = event[:-3] + b',"obfuscation":"', b'"}\n\n'
        return begin + noise(len(begin) + len(end)) + end
    if event.startswith(b":"):
        return event[:-2] + noise(len(event)) + b"\n\n"
    return event


def noise(size: int) -> bytes:
    """What so many bytes lack: random letters and digits, as compression makes others small."""
    lacking = LEAST - size if size < LEAST else -size % SIZE
    return secrets.token_hex(LEAST // 2)[:lacking].encode()
