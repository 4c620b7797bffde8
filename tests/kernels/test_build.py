"""Which library of kernels a process uses: one that came in the wheel, or one compiled here."""

import _ctypes
import shutil
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


COMPILERS = {
    "there is none": ("no-such-compiler", "no C++ compiler found"),
    "it refuses the kernels": (shutil.which("false"), "could not compile the kernels"),
}


@pytest.mark.parametrize(("compiler", "complaint"), COMPILERS.values(), ids=COMPILERS)
def test_without_a_compiler_the_reference_serves_and_says_so(
    compiler, complaint, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("CXX", compiler)
    assert load(torch.device("cpu")) is reference
    (line,) = caplog.messages
    assert complaint in line and "the reference kernels serve" in line
    assert list(tmp_path.rglob("*.so")) == []


def native():
    return kernels("native").library._name


def test_kernels_are_compiled_once(monkeypatch):
    compiled = []

    def compile_to(path, flags):
        compiled.append(flags)
        shutil.copy(native(), path)

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    for _ in range(2):
        build.kernels.cache_clear()
        assert build.library().specserve_sample
    assert compiled == [levels.native_flags()]


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
    monkeypatch.setattr(compiler, "compile_to", lambda path, _: shutil.copy(native(), path))
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
    "AVX-512": (levels.V4, True, "x86-64-v4"),
    "AVX-512 that multiplies bf16": (levels.BF16, True, "x86-64-v4-bf16"),
    "AMX": (levels.AMX, True, "x86-64-v4-amx"),
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
