"""Which library of kernels a process uses: one that came in the wheel, or one compiled here."""

import _ctypes
import errno
import fcntl
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from specserve_kernels import cpu, load, reference
from specserve_kernels.cpu import build, compiler, levels
from tests.kernels.levels import FLAGS, kernels


@pytest.fixture(autouse=True)
def choose_again(monkeypatch, tmp_path):
    """A cache folder of this test's own, and no library chosen yet."""
    kernels("native")  # compiled outside that folder, once for all tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.kernels.cache_clear()
    yield
    build.kernels.cache_clear()


TRUE, FALSE = shutil.which("true"), shutil.which("false")
COMPILERS = {  # CXX -> the complaint
    "there is none": (
        "nonsense-g++ -O2",
        "no C++ compiler found at CXX='nonsense-g++ -O2'. Set CXX",
    ),
    "it is no command": ("'g++", 'CXX="\'g++" is not a command (No closing quotation). Set CXX'),
    "it refuses the kernels": (
        FALSE,
        f"{FALSE} could not compile the kernels (exit code 1). Set CXX",
    ),
    "it makes no library": (f"{TRUE} -x", f"{TRUE} -x produced no usable library. Set CXX"),
}


@pytest.mark.parametrize(("compiler", "complaint"), COMPILERS.values(), ids=COMPILERS)
def test_without_a_compiler_the_reference_serves_and_says_so(
    compiler, complaint, tmp_path, monkeypatch, caplog, capsys
):
    monkeypatch.setenv("CXX", compiler)
    assert load(torch.device("cpu")) is reference
    line = f"{complaint} to g++ 11 or later"
    assert line in caplog.messages[-1] and "Using the slow reference kernels" in caplog.messages[-1]
    assert list((tmp_path / "specserve").iterdir()) == []
    assert build.main() == 1
    assert f"kernels: {line}" in capsys.readouterr().err


def test_a_file_that_is_no_program_is_named(tmp_path, monkeypatch):
    text = tmp_path / "g++"
    text.write_text("no program")
    text.chmod(0o755)
    monkeypatch.setenv("CXX", str(text))
    with pytest.raises(cpu.BuildError, match=r"g\+\+ cannot be run .*\. Set CXX"):
        build.library()


def test_what_the_compiler_says_follows_the_one_line(tmp_path, monkeypatch, capsys):
    failing = tmp_path / "c++"
    failing.write_text("#!/bin/sh\necho 'error: no such thing' >&2\nexit 4\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    assert build.main() == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "(exit code 4; error: no such thing)" in first
    assert first.endswith(". Using the slow reference kernels instead.")
    assert second == "error: no such thing"


COMMANDS = {  # CXX -> the command
    "unset": (None, ["g++"]),
    "empty": (" ", ["g++"]),
    "with flags": ("g++ -O2", ["g++", "-O2"]),
    "with a launcher": ("env 'g++'", ["env", "g++"]),
}


@pytest.mark.parametrize(("value", "command"), COMMANDS.values(), ids=COMMANDS)
def test_the_compiler_is_named_as_for_a_shell(value, command, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    usual = compiler.build_hash(())
    if value is not None:
        monkeypatch.setenv("CXX", value)
    program, *args = command
    assert compiler.compiler() == (shutil.which(program), *args)
    assert (compiler.build_hash(()) == usual) == (not args), "its flags shape the library"


def test_no_compiler_at_all_is_reported_with_what_to_install(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(cpu.BuildError, match=r"no C\+\+ compiler found\. Install g\+\+"):
        compiler.compiler()


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """The usual cache folder cannot be made; returns the folder for temporary files."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/x")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


FOREIGN = {  # what is in the place of the private folder
    "a link": lambda path: (path.with_name("other").mkdir(), path.symlink_to("other")),
    "a file": lambda path: path.write_text(""),
    "a folder for a group": lambda path: (path.mkdir(), path.chmod(0o750)),
    "a folder for all": lambda path: (path.mkdir(), path.chmod(0o703)),
}


@pytest.mark.parametrize("put", FOREIGN.values(), ids=FOREIGN)
def test_a_temporary_folder_that_others_can_change_has_no_kernels(no_cache, put):
    put(no_cache / f"specserve-{os.geteuid()}")
    with pytest.raises(cpu.BuildError, match=r"is not private to this user\. Set XDG_CACHE_HOME"):
        compiler.cache_folder()


def test_a_temporary_folder_of_another_user_has_no_kernels(no_cache, monkeypatch):
    compiler.cache_folder()
    name, other = f"specserve-{os.geteuid()}", os.geteuid() + 1
    (no_cache / name).rename(no_cache / f"specserve-{other}")
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(cpu.BuildError, match="is not private to this user"):
        compiler.cache_folder()


def test_a_cache_that_is_read_only_serves_what_it_has(tmp_path, compiled, monkeypatch):
    found = compiler.compiled(("-O1",))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, _: tmp_path / "specserve" != path)
    assert compiler.compiled(("-O1",)) == found
    other = compiler.compiled(("-O2",))
    assert other.parent == tmp_path / f"specserve-{os.geteuid()}"
    assert compiled == [("-O1",), ("-O2",)]


def test_a_full_disk_asks_for_space(tmp_path, monkeypatch):
    failing = tmp_path / "c++"
    failing.write_text("#!/bin/sh\necho 'as: x.o: No space left on device' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(
        cpu.BuildError, match=r"a disk is full\. Free space in .*, or set XDG_CACHE"
    ):
        build.library()
    monkeypatch.delenv("CXX")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiler, "keep", full)
    with pytest.raises(cpu.BuildError, match="Free space on its disk, or set XDG_CACHE_HOME"):
        build.library()


def native():
    return kernels("native").library._name


@pytest.fixture
def compiled(monkeypatch):
    """The flags of what has been compiled, which takes no time: a library is copied."""
    flags_of = []

    def compile_to(path, flags, _):
        flags_of.append(flags)
        shutil.copy(native(), path)

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    return flags_of


def test_kernels_are_compiled_once(compiled, caplog):
    for _ in range(2):
        build.kernels.cache_clear()
        assert build.library().specserve_sample
    assert compiled == [levels.native_flags()]
    assert caplog.messages == ["Compiling the C++ kernels for this CPU once, in about 15 s"]


@pytest.fixture
def lock():
    """Held, as by another process that is compiling."""
    handle = os.open(compiler.cache_folder(), os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield handle
    os.close(handle)


def path_of(*flags):
    return compiler.cache_folder() / f"kernels-{compiler.build_hash(flags)}.so"


def test_who_finds_a_library_does_not_wait_for_one_that_is_compiled(compiled, lock, caplog):
    path = path_of("-O1")
    shutil.copy(native(), path)
    finding = threading.Thread(target=compiler.compiled, args=[("-O1",)], daemon=True)
    finding.start()
    finding.join(10)
    assert not finding.is_alive()
    assert compiled == caplog.messages == []


def test_who_needs_what_is_being_compiled_waits_for_it_and_says_so(compiled, lock, caplog):
    path = path_of("-O1")
    waiting = threading.Thread(target=compiler.compiled, args=[("-O1",)])
    waiting.start()
    while not caplog.messages:
        time.sleep(0.01)
    shutil.copy(native(), path)
    fcntl.flock(lock, fcntl.LOCK_UN)
    waiting.join()
    assert caplog.messages == ["Waiting for another process that is compiling the C++ kernels"]
    assert compiled == []


def test_what_was_not_used_for_a_month_is_removed_with_the_next_compilation(compiled):
    folder = compiler.cache_folder()
    used = compiler.compiled(("-O1",))
    month, names = (
        31 * 24 * 3600,
        ("kernels-old.so", "threads-old.json", "costs-old.json", "threads-new.json", "mine"),
    )
    for name in names:
        (folder / name).write_text("")
    (folder / "kernels-killed").mkdir()
    for path in folder.iterdir():
        if path.name != "threads-new.json":
            os.utime(path, (time.time() - month, time.time() - month))
    assert compiler.compiled(("-O1",)) == used, "which is a use"
    assert len(list(folder.iterdir())) == 7, "nothing has been compiled"
    new = compiler.compiled(("-O2",))
    left = {used.name, new.name, "threads-new.json", "mine"}
    assert {path.name for path in folder.iterdir()} == left


def test_a_library_that_is_removed_while_it_is_looked_at_is_still_loaded(monkeypatch):
    """By a process that removes what was not used for long."""
    path = path_of(*levels.native_flags())
    shutil.copy(native(), path)
    found = compiler.compiled(levels.native_flags())
    monkeypatch.setattr(build, "compiled", lambda _: found.unlink() or found)
    assert build.library().specserve_sample and not path.exists()


@pytest.fixture
def prebuilt(tmp_path, monkeypatch):
    """Puts libraries for levels where a wheel has them; there is no compiler."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    monkeypatch.setattr(build, "PREBUILT", folder)
    monkeypatch.setenv("CXX", "no-such-compiler")

    def put(level):
        path = folder / build.prebuilt_name(level)
        shutil.copy(native(), path)
        return path

    return put


needs_two_levels = pytest.mark.skipif(
    "x86-64-v4" not in FLAGS, reason="needs a CPU with AVX-512: its libraries can be chosen among"
)


@needs_two_levels
def test_the_best_prebuilt_library_serves_without_a_compiler(prebuilt, capsys):
    lowest, *_, best = levels.usable_levels()
    _, path = prebuilt(lowest), prebuilt(best)
    assert load("cpu") is cpu and build.level() == best.name
    assert build.main() == 0
    said = f"{best.name}, prebuilt for the best level that this CPU runs: {path}\n"
    assert capsys.readouterr().out == f"kernels: {said}"


@needs_two_levels
def test_a_lower_level_serves_only_where_nothing_can_be_compiled(prebuilt, monkeypatch, capsys):
    prebuilt(levels.usable_levels()[0])
    assert build.main() == 0
    words = "prebuilt for a lower level than this CPU's: no C++ compiler found"
    assert words in capsys.readouterr().out
    build.kernels.cache_clear()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compiler, "compile_to", lambda path, *_: shutil.copy(native(), path))
    assert build.main() == 0
    assert "compiled for this CPU" in capsys.readouterr().out


UNFIT = {
    "of other sources": lambda path: path.rename(path.with_name(path.stem[:-1] + "x.so")),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "no library": lambda path: path.write_bytes(bytes(99)),
}


@needs_two_levels
@pytest.mark.parametrize("spoil", UNFIT.values(), ids=UNFIT)
def test_a_prebuilt_library_that_does_not_fit_is_passed_over(prebuilt, spoil):
    spoil(prebuilt(levels.usable_levels()[-1]))
    assert load("cpu") is reference


CPUS = {  # flags in /proc/cpuinfo, does Linux grant the tiles -> the best level
    "AVX2": (levels.V3, True, "x86-64-v3"),
    "AVX-VNNI": (levels.V3 | {"avx_vnni"}, True, "x86-64-v3-vnni"),
    "AVX-512": (levels.V4, True, "x86-64-v4"),
    "AVX-512 that multiplies bf16": (levels.BF16, True, "x86-64-v4-bf16"),
    "AMX": (levels.AMX | {"avx_vnni"}, True, "x86-64-v4-amx"),
    "AMX on a kernel without it": (levels.AMX, False, "x86-64-v4-bf16"),
    "AVX-512 without a part of it": (levels.V4 - {"avx512dq"}, True, "x86-64-v3"),
    "neither": (frozenset({"sse4_2", "avx"}), True, None),
}


@pytest.mark.parametrize(("flags", "is_granted", "best"), CPUS.values(), ids=CPUS)
def test_the_level_is_what_the_cpu_and_the_system_allow(flags, is_granted, best, monkeypatch):
    monkeypatch.setattr(levels.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(levels, "cpu_flags", lambda: flags)
    monkeypatch.setattr(levels, "may_use_tiles", lambda: is_granted)
    levels.usable_flags.cache_clear()
    usable, native = levels.usable_levels(), levels.native_flags()
    levels.usable_flags.cache_clear()
    assert (usable[-1].name if usable else None) == best
    assert ("-mno-amx-tile" in native) == (not is_granted)


ARM_CPUS = {  # flags in /proc/cpuinfo -> the best level
    "ARMv8.0": (frozenset({"fp", "asimd"}), "aarch64"),
    "dotprod": (levels.DOTPROD | {"asimd"}, "aarch64-dotprod"),
    "i8mm": (levels.DOTPROD | {"i8mm", "bf16"}, "aarch64-i8mm"),
    "i8mm without dotprod": (frozenset({"i8mm"}), "aarch64"),
}


@pytest.mark.parametrize(("flags", "best"), ARM_CPUS.values(), ids=ARM_CPUS)
def test_the_level_of_arm_is_what_the_cpu_allows(flags, best, monkeypatch):
    monkeypatch.setattr(levels.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(levels, "usable_flags", lambda: flags)
    assert levels.usable_levels()[-1].name == best


def test_flags_are_those_of_the_first_cpu(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert levels.cpu_flags(info) == {"fpu", "avx2"}
    info.write_text("Features\t: fp asimd\n")
    assert levels.cpu_flags(info) == {"fp", "asimd"}
    assert levels.cpu_flags(tmp_path / "none") == frozenset()


@pytest.mark.parametrize(
    ("flags", "want"),
    [("avx2 avx512f avx512_bf16", True), ("asimd bf16", True), ("avx512f", False)],
)
def test_only_the_reference_needs_hardware_for_bf16(flags, want, tmp_path, monkeypatch):
    monkeypatch.setattr("specserve_kernels.host.instruction_set", lambda: flags)
    assert reference.has_bf16() == want
    assert cpu.has_bf16()


def test_a_library_of_somebody_else_is_not_loaded_as_the_kernels():
    assert not compiler.loads(Path(_ctypes.__file__))


def test_a_process_may_use_a_lower_level(compiled, monkeypatch):
    monkeypatch.setattr(build, "CHOSEN", [])
    lowest = levels.usable_levels()[0]
    with pytest.raises(ValueError, match="this CPU cannot run 'z80'"):
        build.use_level("z80")
    build.use_level(lowest.name)
    assert build.kernels().origin == "for the chosen level"
    assert compiled == [lowest.flags]
    with pytest.raises(AssertionError, match="another library is in use"):
        build.use_level(lowest.name)
