"""Blocks on disk: found after a restart with their own content, or not at all."""

import errno
import os
import signal
import subprocess
import sys
import time
from random import Random
from unittest.mock import Mock

import pytest

from specserve.memory import disk_tier
from specserve.memory.disk_tier import ENTRY_BYTES, DiskInUse, DiskTier, ForeignFile

BYTES = 4096


def key_of(i):
    return i.to_bytes(32, "big")


def block_of(i):
    return memoryview(Random(i).randbytes(BYTES))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tier"


def tier_of(folder, num_blocks=8, block_bytes=BYTES):
    return DiskTier(folder, num_blocks * block_bytes, block_bytes)


def written(folder, numbers=range(3), **given):
    """The folder of a tier that was closed after these blocks, which lie in order."""
    tier = tier_of(folder, **given)
    tier.free.reverse()
    for i in numbers:
        tier.write(key_of(i), block_of(i)).result()
    tier.close()
    return folder


def read(tier, i):
    """Whether block i is found; its content is then right."""
    out = bytearray(BYTES)
    is_found = tier.read(key_of(i), memoryview(out)).result()
    assert not is_found or out == block_of(i), "other content is found"
    return is_found


def test_the_blocks_of_a_prefix_lie_in_the_order_of_reads(folder):
    tier = tier_of(folder, 3)
    for i in (2, 1, 0):  # as they are evicted
        tier.write(key_of(i), block_of(i)).result()
    assert [tier.found[key_of(i)] for i in range(3)] == [0, 1, 2]
    tier.close()


def found(folder, numbers=range(3), **given):
    tier = tier_of(folder, **given)
    try:
        return [i for i in numbers if read(tier, i)]
    finally:
        tier.close()


def test_blocks_survive_a_restart(folder):
    assert found(written(folder)) == [0, 1, 2]


def test_the_least_recently_used_block_is_evicted_also_after_a_restart(folder):
    tier = tier_of(folder, 3)
    for i in (0, 1, 2):
        tier.write(key_of(i), block_of(i)).result()
    assert read(tier, 0)
    tier.close()
    written(folder, [3], num_blocks=3)
    assert found(folder, range(4), num_blocks=3) == [0, 2, 3]


def test_pinned_blocks_are_not_evicted(folder):
    tier = tier_of(folder, 3)
    for i in range(3):
        tier.write(key_of(i), block_of(i)).result()
    tier.pin([key_of(0), key_of(1)])
    for i in (3, 4):
        tier.write(key_of(i), block_of(i)).result()
    assert [i for i in range(5) if read(tier, i)] == [0, 1, 4]
    tier.pin([key_of(i) for i in (0, 1, 4)])
    tier.write(key_of(5), block_of(5)).result()
    assert [i for i in range(6) if read(tier, i)] == [0, 1, 4]
    tier.close()


def overwrite(file, at, data):
    with open(file, "r+b") as out:
        out.seek(at)
        out.write(data)


DAMAGES = {  # -> the blocks that are found
    "a block": (lambda f: overwrite(f / "blocks", BYTES + 9, b"\xff\x00\xaa"), [0, 2]),
    "an entry's key": (lambda f: overwrite(f / "index", 2 * ENTRY_BYTES + 3, b"x"), [0, 2]),
    "an entry's checksum": (lambda f: overwrite(f / "index", 2 * ENTRY_BYTES + 41, b"x"), [0, 2]),
    "another version": (lambda f: overwrite(f / "index", 12, b"\x09"), []),
    "a cleared index": (lambda f: (f / "index").write_bytes(bytes(990)), []),
    "an empty index": (lambda f: (f / "index").write_bytes(b""), []),
    "a cut index": (lambda f: os.truncate(f / "index", 2 * ENTRY_BYTES + 20), [0]),
    "cut blocks": (lambda f: os.truncate(f / "blocks", 2 * BYTES + 5), [0, 1]),
    "foreign blocks": (lambda f: (f / "blocks").write_bytes(os.urandom(8 * BYTES)), []),
    "no blocks": (lambda f: (f / "blocks").unlink(), []),
    "no index": (lambda f: (f / "index").unlink(), []),
}


@pytest.mark.parametrize(("damage", "left"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_blocks_are_not_found_and_can_be_written_again(folder, damage, left):
    damage(written(folder))
    assert found(folder) == left
    written(folder, [i for i in range(3) if i not in left])
    assert found(folder) == [0, 1, 2]


def test_blocks_of_another_size_are_dropped_with_a_warning(folder, caplog):
    written(folder)
    assert not caplog.messages
    other = tier_of(folder, block_bytes=2 * BYTES)
    assert len(other) == 0
    assert caplog.messages == ["memory.disk_path: dropping all blocks, which have another size"]
    other.close()


def test_files_of_another_program_stay_as_they_are(folder):
    folder.mkdir()
    files = {"index": b"DIRC" * 99, "blocks": b"data"}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    for _ in range(2):  # the first one leaves the folder unlocked
        with pytest.raises(ForeignFile, match="index belongs to another program"):
            tier_of(folder)
    assert {name: (folder / name).read_bytes() for name in files} == files


def test_fewer_bytes_keep_fewer_blocks_and_free_the_disk(folder):
    written(folder, range(8))
    assert found(folder, range(8), num_blocks=4) == [0, 1, 2, 3]
    assert (folder / "blocks").stat().st_size == 4 * BYTES
    assert found(folder, range(8), num_blocks=8) == [0, 1, 2, 3]


def test_a_folder_serves_one_process_at_a_time(folder):
    tier = tier_of(folder)
    with pytest.raises(DiskInUse, match="in use by another process"):
        tier_of(folder)
    tier.close()
    tier_of(folder).close()


def test_a_full_disk_ends_writing_but_not_reading(folder, monkeypatch, caplog):
    tier = tier_of(folder)
    tier.write(key_of(0), block_of(0)).result()

    def full(file, data, at):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        tier.write(key_of(1), block_of(1)).result()
    tier.write(key_of(2), block_of(2)).result()
    assert not tier.is_writable and "No space left" in tier.failure
    assert "no more KV blocks" in caplog.text and tier.stats.failures == 1
    assert [i for i in range(3) if read(tier, i)] == [0]
    tier.close()
    assert found(folder) == [0]


def test_an_emptied_tier_has_no_blocks_and_takes_new_ones(folder):
    tier = tier_of(folder)
    for i in range(3):
        tier.write(key_of(i), block_of(i)).result()
    tier.clear()
    assert (folder / "blocks").stat().st_size == 0
    tier.write(key_of(7), block_of(7)).result()
    tier.close()
    assert found(folder, range(8)) == [7]


def test_only_the_user_can_read_the_files(folder):
    written(folder)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


WRITER = """
import sys
from pathlib import Path
from tests.memory.test_disk_tier import block_of, key_of, tier_of
tier = tier_of(Path(sys.argv[1]), 5)
print("ready", flush=True)
for i in range(10**9):
    tier.write(key_of(i % 40), block_of(i % 40)).result() if key_of(i % 40) not in tier else None
"""


def test_a_process_that_is_killed_while_it_writes_leaves_only_right_blocks(folder):
    num_found = 0
    for pause in (0.0, 0.003, 0.011, 0.02):
        command = [sys.executable, "-c", WRITER, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(pause)
            process.send_signal(signal.SIGKILL)
        num_found += len(found(folder, range(40), num_blocks=5))
    assert num_found > 0


def test_a_kill_at_any_point_of_a_write_leaves_only_right_blocks(folder, monkeypatch):
    """The process ends before, within or after each of the three writes."""

    class Killed(BaseException):
        pass

    pwrite, sizes = os.pwrite, [0, 7, None]
    for call in range(3):
        for size in sizes:
            written(folder, [0, 1], num_blocks=2)
            tier, calls = tier_of(folder, 2), []

            def killing(file, data, at, calls=calls, call=call, size=size):
                calls.append(at)
                if len(calls) <= call:
                    return pwrite(file, data, at)
                pwrite(file, data[:size], at)
                raise Killed

            with monkeypatch.context() as patch:
                patch.setattr(disk_tier.os, "pwrite", killing)
                with pytest.raises(Killed):
                    tier.write_now(key_of(2), block_of(2))
            tier.close_files()
            left = found(folder, range(3), num_blocks=2)
            assert set(left) >= {1}, "a kill damaged another block"


@pytest.mark.parametrize("name", ["index", "blocks"])
def test_a_symbolic_link_is_refused_and_its_file_stays(folder, tmp_path, name):
    other = tmp_path / "other"
    other.write_text("of somebody else")
    folder.mkdir()
    (folder / name).symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        tier_of(folder)
    assert other.read_text() == "of somebody else"


def test_a_folder_that_cannot_be_used_is_not_locked(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "open", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            tier_of(folder)
    tier_of(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700
