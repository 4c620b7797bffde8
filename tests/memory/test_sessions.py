"""Sessions keep the blocks of conversations, for the next start as well."""

import pytest
import torch

from specserve.memory import sessions as module
from specserve.memory.blocks import BlockPool
from specserve.memory.disk_tier import DiskTier
from specserve.memory.host_tier import HostTier
from specserve.memory.sessions import Session, Sessions
from specserve.memory.tiers import Tiers
from specserve_kernels.host import HostBlocks

BYTES = 64


@pytest.fixture
def begin(tmp_path):
    """Starts of a server with one folder."""
    started = []

    def start(num_blocks=16):
        for each in started:
            each.tiers.close()
        disk = DiskTier(tmp_path, num_blocks * BYTES, BYTES)
        tiers = Tiers(BlockPool(8, BYTES), HostTier(8), HostBlocks(8, BYTES), disk)
        started[:] = [Sessions(tiers, tmp_path / "sessions")]
        return started[0]

    yield start
    started[0].tiers.close()


def key_of(i):
    return bytes([i]) * 32


def test_pins_survive_a_restart(begin):
    first = begin()
    first.record("talk", 0, [key_of(1), key_of(2)], [key_of(3)])
    first.record("talk", 1, [key_of(4)], [])
    first.record("other", 0, [key_of(5)], [])
    first.pin("talk", True)
    again = begin()
    assert again.pinned_keys == [key_of(i) for i in (1, 2, 3, 4)]
    assert again.tiers.disk.pinned == {key_of(i) for i in (1, 2, 3, 4)}
    again.record("talk", 1, [key_of(4), key_of(6)], [])
    assert key_of(6) in again.tiers.disk.pinned, "a pinned conversation goes on"
    again.pin("talk", False)
    assert not again.tiers.disk.pinned and not begin().pinned_keys


def test_the_oldest_sessions_that_are_not_pinned_are_dropped(begin, monkeypatch):
    sessions = begin()
    monkeypatch.setattr(module, "MOST_BYTES", 3 * Session([key_of(0)], []).num_bytes("pinned"))
    sessions.record("pinned", 0, [key_of(0)], [])
    sessions.pin("pinned", True)
    for i in range(1, 5):
        sessions.record(f"{i}", 0, [key_of(i)], [])
    assert [name for name, _ in sessions.known] == ["pinned", "3", "4"]
    sessions.record("long " * 1000, 0, [key_of(5)], [])
    assert [name for name, _ in sessions.known] == ["pinned"], "names count as well"
    assert sessions.num_bytes == sessions.known["pinned", 0].num_bytes("pinned")


@pytest.mark.parametrize("content", [b"", b"\x00", b"[[1]]", b"\x93\x01\x02\x03"])
def test_a_damaged_file_is_ignored_with_a_warning(begin, tmp_path, caplog, content):
    (tmp_path / "sessions").write_bytes(content)
    assert not begin().known
    assert "cannot be read" in caplog.text


def settle(sessions):
    """Steps of an engine that does nothing else, until all tasks have ended."""
    tiers, arena = sessions.tiers, torch.zeros(8, BYTES, dtype=torch.uint8)
    for _ in range(100):
        tiers.advance()
        tiers.memory.store(arena, tiers.pool.updates.take().stores)
        tiers.wait(1.0)
        if sessions.finished():
            return
    raise AssertionError("a task does not end")


def test_a_pinned_session_that_the_disk_cannot_hold_is_saved_in_part(begin):
    sessions = begin(num_blocks=2)
    pool, keys = sessions.tiers.pool, [key_of(i) for i in range(1, 5)]
    for block, key in zip(pool.try_allocate(4), keys, strict=True):
        pool.publish(block, key)
    sessions.record("talk", 0, keys, [])
    sessions.pin("talk", True)
    sessions.save(1, "talk")
    settle(sessions)
    assert sessions.count("talk") == (4, 4, 2)


def test_a_load_passes_over_blocks_that_are_lost(begin):
    sessions = begin()
    sessions.tiers.disk.write(key_of(2), memoryview(bytes(BYTES))).result()
    sessions.record("talk", 0, [key_of(1)], [key_of(2)])
    sessions.load(1, "talk")
    settle(sessions)
    assert sessions.count("talk") == (2, 1, 1)


def test_only_the_user_can_read_the_sessions(begin, tmp_path):
    sessions = begin()
    sessions.record("talk", 0, [key_of(1)], [])
    sessions.write()
    assert (tmp_path / "sessions").stat().st_mode & 0o777 == 0o600


def test_after_a_failed_write_saves_fail_with_the_reason_and_loads_do_not(begin):
    sessions = begin()
    disk = sessions.tiers.disk
    disk.write(key_of(1), memoryview(bytes(BYTES))).result()
    disk.failure = "No space left"
    sessions.record("on disk", 0, [key_of(1)], [])
    sessions.record("in memory", 0, [key_of(1), key_of(2)], [])
    sessions.save(1, "on disk")
    sessions.save(2, "in memory")
    sessions.load(3, "in memory")
    while sessions.tiers.saving or sessions.tiers.reads:
        sessions.tiers.advance()
    assert [(id, bool(failure)) for id, _, failure in sessions.finished()] == [
        (1, False),
        (2, True),
        (3, False),
    ]
