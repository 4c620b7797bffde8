"""Named sessions: the blocks of a conversation, which callers can save, load and pin."""

import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from specserve.memory.tiers import Tiers

log = logging.getLogger("specserve")

MOST_BYTES = 1 << 27  # about the most memory of all sessions; older sessions are dropped
MOST_READ = 0.5  # share of the host tier that a load may fill


class Session(msgspec.Struct):
    """The keys of a conversation's blocks, each prefix in order.

    keys        of the target's blocks
    draft_keys  of the draft model's blocks
    """

    keys: list[bytes]
    draft_keys: list[bytes]
    is_pinned: bool = False

    @property
    def every_key(self) -> list[bytes]:
        return [*self.keys, *self.draft_keys]

    def num_bytes(self, name: str) -> int:
        """About the memory of the session and its name."""
        return 512 + 4 * len(name) + 80 * (len(self.keys) + len(self.draft_keys))


class Task(NamedTuple):
    """A save or load of sessions that has not ended."""

    id: int
    name: str
    keys: list[bytes]
    is_save: bool


class Sessions:
    """The sessions of all tenants, by name. Two tenants' sessions may have one name.

    `file` keeps the sessions for the next start.
    """

    def __init__(self, tiers: Tiers, file: Path | None = None) -> None:
        self.tiers, self.file = tiers, file
        self.known: OrderedDict[tuple[str, int], Session] = OrderedDict()  # the oldest first
        self.num_bytes = 0
        self.tasks: list[Task] = []
        for name, tenant, session in () if file is None else read(file):
            self.put(name, tenant, session)
        self.pin_keys()

    def put(self, name: str, tenant: int, session: Session) -> None:
        """Add or replace a session. The oldest sessions that are not pinned are dropped if all
        together take too much memory.
        """
        before = self.known.get((name, tenant))
        if before is not None:
            session.is_pinned |= before.is_pinned
            self.drop(name, tenant)
        self.known[name, tenant] = session
        self.num_bytes += session.num_bytes(name)
        old, left = list[tuple[str, int]](), self.num_bytes
        for each, other in self.known.items():
            if left <= MOST_BYTES:
                break
            if not other.is_pinned:
                old.append(each)
                left -= other.num_bytes(each[0])
        for each in old:
            self.drop(*each)

    def drop(self, name: str, tenant: int) -> None:
        self.num_bytes -= self.known.pop((name, tenant)).num_bytes(name)

    def record(
        self, name: str, tenant: int, keys: Sequence[bytes], draft_keys: Sequence[bytes]
    ) -> None:
        """Set the blocks of a session to those of its last request."""
        if keys:
            session = Session([*keys], [*draft_keys])
            self.put(name, tenant, session)
            if session.is_pinned:
                self.pin_keys()

    def named(self, name: str) -> list[Session]:
        """The sessions of this name, of all tenants."""
        return [session for (each, _), session in self.known.items() if each == name]

    def pin(self, name: str, is_pinned: bool) -> None:
        for session in self.named(name):
            session.is_pinned = is_pinned
        self.pin_keys()
        self.write()

    def pin_keys(self) -> None:
        """Keep the blocks of pinned sessions in the tiers."""
        keys = self.pinned_keys
        self.tiers.host.pin(keys)
        if self.tiers.disk is not None:
            self.tiers.disk.pin(keys)

    @property
    def pinned_keys(self) -> list[bytes]:
        pinned = (session for session in self.known.values() if session.is_pinned)
        return [key for session in pinned for key in session.every_key]

    def save(self, id: int, name: str) -> None:
        """Begin to write a session's blocks to disk; `finished` returns its id."""
        keys = [key for session in self.named(name) for key in session.every_key]
        self.tiers.save(keys)
        self.tasks.append(Task(id, name, keys, True))
        self.write()

    def load(self, id: int, name: str) -> None:
        """Begin to read a session's blocks from disk to host memory; `finished` returns its id."""
        keys = [key for session in self.named(name) for key in session.every_key]
        self.tiers.fetch(keys, int(MOST_READ * self.tiers.host.num_blocks))
        self.tasks.append(Task(id, name, keys, False))

    @property
    def is_busy(self) -> bool:
        return bool(self.tasks)

    def finished(self) -> list[tuple[int, str, str]]:
        """Return the id and name of saves and loads that have ended since the last call, and why
        a save failed; empty if it did not.
        """
        tiers, ended = self.tiers, list[tuple[int, str, str]]()
        for task in [*self.tasks]:
            busy = tiers.saving if task.is_save else tiers.reads
            if not any(key in busy for key in task.keys):
                self.tasks.remove(task)
                failure = tiers.write_failure(task.keys) if task.is_save else ""
                ended.append((task.id, task.name, failure))
        return ended

    def count(self, name: str) -> tuple[int, int, int]:
        """The blocks of the sessions with this name: all, those in pool or host memory, and those
        on disk.
        """
        keys = [key for session in self.named(name) for key in session.every_key]
        tiers = self.tiers
        near = sum(key in tiers.host.found or tiers.pool.block_of(key) is not None for key in keys)
        far = 0 if tiers.disk is None else sum(key in tiers.disk for key in keys)
        return len(keys), near, far

    def reset(self) -> None:
        """Drop all sessions."""
        self.known.clear()
        self.num_bytes = 0
        self.pin_keys()
        self.write()

    def write(self) -> None:
        """Replace the file, for the next start."""
        if self.file is None:
            return
        rows = [(*each, session) for each, session in self.known.items()]
        temporary = self.file.with_suffix(".new")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            descriptor = os.open(temporary, flags, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(msgspec.msgpack.encode(rows))
            os.replace(temporary, self.file)
        except OSError as e:
            log.error("memory.disk_path: the sessions cannot be written: %s", e)


def read(file: Path) -> list[tuple[str, int, Session]]:
    """Return the sessions of an earlier start; none, with a warning, if the file is damaged."""
    try:
        data = file.read_bytes()
        return msgspec.msgpack.decode(data, type=list[tuple[str, int, Session]])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as e:
        log.warning("Ignoring %s, which cannot be read: %s", file, e)
        return []
