"""The disk tier: KV blocks in one file, found by their keys, also after a restart."""

import fcntl
import logging
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from struct import Struct
from threading import Lock
from time import perf_counter
from zlib import crc32

import msgspec

log = logging.getLogger("specserve")

HEADER = Struct("<12sIQ")  # MAGIC, VERSION, bytes of a block
MAGIC, VERSION = b"specserve-kv", 1
ENTRY = Struct("<32sQI")  # key, time of the last use, CRC-32 of the block; then CRC-32 of these
CHECKSUM = Struct("<I")
ENTRY_BYTES = 64  # bytes per entry of the index, and of its header
READERS = 2  # threads, so that one reads while the other computes a checksum
UNKNOWN = 2e9  # bytes per second; first estimate of reads
FADE = 0.2  # weight of a read in the estimate


class DiskInUse(OSError):
    """Another process uses the folder."""


class ForeignFile(OSError):
    """The folder has a file that belongs to another program."""


class TierStats(msgspec.Struct):
    """Sums of one tier, in blocks; a block has the target's or the draft model's KV."""

    hits: int = 0  # blocks that came back to the pool
    stores: int = 0
    evictions: int = 0
    skips: int = 0  # evicted blocks that were not stored, because the tier was busy
    failures: int = 0  # blocks that could not be written or read
    num_bytes: int = 0  # in the tier at present


class DiskTier:
    """KV blocks in a folder, evicted in least-recently-used order.

    The file `blocks` has places of equal size. The file `index` has a header, and an entry per
    place: key and checksums. A place is written in this order: clear the entry, write the block,
    write the entry. A process that is killed in between leaves a place without a key. A block with
    a wrong checksum is not found.

    Threads read and write. All other methods belong to the caller's thread.
    """

    def __init__(self, folder: Path, num_bytes: int, block_bytes: int) -> None:
        """DiskInUse if another process uses the folder, ForeignFile if its `index` is another
        program's, OSError if it cannot be used.
        """
        self.block_bytes, self.num_blocks = block_bytes, num_bytes // block_bytes
        self.seconds = block_bytes / UNKNOWN  # estimated time to read a block
        self.stats, self.lock = TierStats(), Lock()
        self.found: OrderedDict[bytes, int] = OrderedDict()  # places, in order of eviction
        self.sums: dict[int, int] = {}  # by place: checksum of the block
        self.pinned: frozenset[bytes] = frozenset()  # keys that are not evicted
        self.failure = ""  # why nothing more is written; empty if blocks are written
        self.time = 0  # of the last use of any block
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.index, self.blocks = (open_file(folder / name) for name in ("index", "blocks"))
        try:
            fcntl.flock(self.index, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.open(folder)
        except BlockingIOError as e:
            self.close_files()
            raise DiskInUse(f"{folder} is in use by another process") from e
        except OSError:
            self.close_files()
            raise
        used = {*self.found.values()}
        # The last place is used first. Ends of prefixes are evicted before their beginnings, so a
        # prefix lies in the order in which it is read.
        self.free = [place for place in range(self.num_blocks) if place not in used]
        self.reader = ThreadPoolExecutor(READERS, thread_name_prefix="KV reads")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="KV writes")

    def open(self, folder: Path) -> None:
        """Read the index. An index of another version or of blocks of another size is emptied."""
        header = HEADER.pack(MAGIC, VERSION, self.block_bytes)
        known_header = os.pread(self.index, len(header), 0)
        if known_header != header:
            if any(known_header) and not known_header.startswith(MAGIC):
                raise ForeignFile(f"{folder / 'index'} belongs to another program")
            if os.fstat(self.blocks).st_size > 0:
                log.warning("memory.disk_path: dropping all blocks, which have another size")
            os.ftruncate(self.index, 0)
            os.ftruncate(self.blocks, 0)
            os.pwrite(self.index, header.ljust(ENTRY_BYTES, b"\0"), 0)
        os.ftruncate(self.index, ENTRY_BYTES * (1 + self.num_blocks))
        if os.fstat(self.blocks).st_size > self.num_blocks * self.block_bytes:
            os.ftruncate(self.blocks, self.num_blocks * self.block_bytes)
        known = sorted(self.entries(), key=lambda entry: entry[1])
        for key, self.time, checksum, place in known:
            self.found[key], self.sums[place] = place, checksum

    def entries(self) -> Iterator[tuple[bytes, int, int, int]]:
        """Yield key, time, checksum and place of each valid entry."""
        index = os.pread(self.index, ENTRY_BYTES * self.num_blocks, ENTRY_BYTES)
        for place in range(len(index) // ENTRY_BYTES):
            entry = index[place * ENTRY_BYTES :][: ENTRY.size + CHECKSUM.size]
            packed, checksum = entry[: ENTRY.size], entry[ENTRY.size :]
            if any(packed) and CHECKSUM.pack(crc32(packed)) == checksum:
                yield (*ENTRY.unpack(packed), place)

    def __contains__(self, key: bytes) -> bool:
        return key in self.found

    def __len__(self) -> int:
        return len(self.found)

    @property
    def is_writable(self) -> bool:
        return not self.failure and self.num_blocks > 0

    def read(self, key: bytes, out: memoryview) -> Future[bool]:
        """Read a block into `out`; the result is whether `out` has the block."""
        return self.reader.submit(self.read_now, key, out)

    def read_now(self, key: bytes, out: memoryview) -> bool:
        with self.lock:
            place = self.found.get(key)
            checksum = None if place is None else self.sums[place]
        if place is None:
            return False
        start, size = perf_counter(), 0
        try:
            size = os.preadv(self.blocks, [out], place * self.block_bytes)
        except OSError as e:
            log.warning("A KV block cannot be read from memory.disk_path: %s", e)
        self.seconds += FADE * (perf_counter() - start - self.seconds)
        is_right = size == self.block_bytes and crc32(out) == checksum
        with self.lock:
            if self.found.get(key) != place:
                return is_right  # it was evicted meanwhile
            self.found.move_to_end(key)
            if not is_right:
                self.stats.failures += 1
                self.drop(key)
        return is_right

    def drop(self, key: bytes) -> None:
        """Free a place; the caller holds the lock."""
        place = self.found.pop(key)
        self.free.append(place)
        del self.sums[place]

    def write(self, key: bytes, block: memoryview) -> Future[None]:
        """Write a block, which must not change before the result is there."""
        return self.writer.submit(self.write_now, key, block)

    def write_now(self, key: bytes, block: memoryview) -> None:
        with self.lock:
            place = None if self.failure else self.place()
        if place is None:
            return
        checksum = crc32(block)
        try:
            self.write_entry(place, b"")
            write_all(self.blocks, block, place * self.block_bytes)
            self.time += 1
            packed = ENTRY.pack(key, self.time, checksum)
            self.write_entry(place, packed + CHECKSUM.pack(crc32(packed)))
        except OSError as e:
            with self.lock:
                self.free.append(place)
                self.stats.failures += 1
                self.failure = str(e)
            log.error("memory.disk_path gets no more KV blocks until the next start: %s", e)
            return
        with self.lock:
            self.found[key], self.sums[place] = place, checksum
            self.stats.stores += 1

    def place(self) -> int | None:
        """Return a free place; evict a block if there is none. The caller holds the lock."""
        if not self.free:
            oldest = next((key for key in self.found if key not in self.pinned), None)
            if oldest is None:
                return None
            self.drop(oldest)
            self.stats.evictions += 1
        return self.free.pop()

    def write_entry(self, place: int, entry: bytes) -> None:
        write_all(self.index, entry.ljust(ENTRY_BYTES, b"\0"), ENTRY_BYTES * (1 + place))

    def pin(self, keys: Collection[bytes]) -> None:
        """Keep the blocks of exactly these keys until the next call."""
        self.pinned = frozenset(keys)

    def clear(self) -> None:
        """Drop all blocks, and free the disk."""
        self.writer.submit(self.clear_now).result()

    def clear_now(self) -> None:
        with self.lock:
            os.ftruncate(self.index, ENTRY_BYTES)
            os.ftruncate(self.index, ENTRY_BYTES * (1 + self.num_blocks))
            os.ftruncate(self.blocks, 0)
            self.found.clear()
            self.sums.clear()
            self.free = [*range(self.num_blocks)]

    def close(self) -> None:
        """Write the order of eviction, and let other processes use the folder."""
        for threads in (self.reader, self.writer):
            threads.shutdown()
        if not self.failure:
            self.write_times()
        self.close_files()

    def write_times(self) -> None:
        for key, place in self.found.items():
            self.time += 1
            packed = ENTRY.pack(key, self.time, self.sums[place])
            self.write_entry(place, packed + CHECKSUM.pack(crc32(packed)))

    def close_files(self) -> None:
        for file in (self.blocks, self.index):
            os.close(file)


def open_file(path: Path) -> int:
    """Open a file that only this user can read; create it if it does not exist. OSError for a
    symbolic link: another user could have set it, and the file that it leads to would be lost.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def write_all(file: int, data: bytes | memoryview, at: int) -> None:
    """Write all bytes at an offset."""
    view = memoryview(data)
    while view:
        size = os.pwrite(file, view, at)
        view, at = view[size:], at + size
