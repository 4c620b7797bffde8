"""Objects of the kernels: which are kept and shared, and when one is compiled anew."""

import ctypes
import re
import subprocess

import pytest

from specserve_kernels.cpu import compiler
from specserve_kernels.cpu.levels import LEVELS, native_flags

SOURCES = sorted(compiler.FOLDER.glob("*.cpp"))
LEVEL_MACROS = re.compile(rb"__(AVX|SSE|FMA|F16C|AMX|ARM_)")


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder with two small sources instead of the kernels', of which one is portable."""
    folder = tmp_path / "sources"
    folder.mkdir()
    files = {
        "one.h": "#if defined(EMULATE_AMX)\n#define ONE 10\n#else\n#define ONE 1\n#endif\n",
        "level.cpp": '  #  include "one.h"\nextern "C" int specserve_run() { return ONE; }\n',
        "team.cpp": 'extern "C" int specserve_two() { return 2; }\n',
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(compiler, "FOLDER", folder)
    return folder


@pytest.fixture
def compile_in(tmp_path, kernels, monkeypatch):
    """Compiles into a cache folder; returns the library and the sources that were compiled."""
    run, names = compiler.run_compiler, []
    folder = tmp_path / "cache"
    folder.mkdir()

    def run_compiler(*args):
        names.extend(arg.rpartition("/")[2] for arg in args if arg.endswith(".cpp"))
        run(*args)

    def compile_in(*flags):
        names.clear()
        path = compiler.compiled_in(folder, flags, compiler.loads)
        return ctypes.CDLL(str(path)), sorted(names)

    monkeypatch.setattr(compiler, "run_compiler", run_compiler)
    return compile_in


def test_an_object_is_compiled_again_only_after_a_change_to_its_code(kernels, compile_in):
    assert compile_in()[1] == ["level.cpp", "team.cpp"]
    header = kernels / "one.h"
    header.write_text("#define ONE 3\n")
    library, compiled = compile_in()
    assert library.specserve_run() == 3
    assert compiled == ["level.cpp"]
    (kernels / "team.cpp").write_text('extern "C" int specserve_two() { return 4; }\n')
    library, compiled = compile_in()
    assert (library.specserve_run(), library.specserve_two()) == (3, 4)
    assert compiled == ["team.cpp"]


def test_levels_share_the_objects_that_do_not_depend_on_them(compile_in):
    library, _ = compile_in("-march=native")
    assert library.specserve_run() == 1
    library, compiled = compile_in("-march=native", "-DEMULATE_AMX")
    assert library.specserve_run() == 10
    assert compiled == ["level.cpp"], "only its header reads the macro"
    library, compiled = compile_in("-mtune=generic", *compiler.STATIC)
    assert (library.specserve_run(), library.specserve_two()) == (1, 2)
    assert compiled == ["level.cpp"], "the other is portable"
    assert compile_in("-mtune=generic")[1] == [], "linker flags affect no object"
    assert compile_in("-O0")[1] == ["level.cpp", "team.cpp"], "any other flag affects all"


def test_an_object_of_code_that_changes_meanwhile_is_not_kept(kernels, compile_in, monkeypatch):
    source, run = kernels / "team.cpp", compiler.run_compiler
    before = source.read_text()

    def run_compiler(*args):
        if str(source) in args:
            source.write_text(before.replace("2", "5"))
        run(*args)

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "run_compiler", run_compiler)
        compile_in()
    source.write_text(before)
    library, compiled = compile_in("-DOTHER")
    assert compiled == ["team.cpp"] and library.specserve_two() == 2


def test_a_broken_object_is_compiled_again(tmp_path, compile_in):
    compile_in()
    (broken,) = (tmp_path / "cache").glob("kernels-team-*.o")
    broken.write_bytes(broken.read_bytes()[:-1])
    library, compiled = compile_in("-DOTHER")
    assert compiled == ["team.cpp"] and library.specserve_two() == 2


def test_the_headers_of_a_source_are_those_that_the_compiler_reads():
    command = [*compiler.compiler(), "-std=c++20", "-MM", "-DEMULATE_AMX", *SOURCES]
    rules = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for rule in rules.replace("\\\n", " ").splitlines():
        source, *headers = (compiler.FOLDER / name for name in rule.split()[1:])
        code = compiler.with_headers(source)
        for path in (source, *headers):
            if path.is_file():  # else it is part of the C++ library
                assert path.read_bytes() in code, f"{source.name} reads {path.name}"


@pytest.mark.parametrize("name", compiler.PORTABLE)
def test_portable_sources_read_no_macro_of_an_instruction_set(name):
    assert not LEVEL_MACROS.search(compiler.with_headers(compiler.FOLDER / f"{name}.cpp"))


def test_what_tiles_do_not_change_is_compiled_once():
    """Else each run of the tests compiles for a minute longer."""
    emulated = *native_flags(), "-DEMULATE_AMX"
    of_tiles = {
        source.stem
        for source in SOURCES
        if compiler.object_name(source, emulated) != compiler.object_name(source, native_flags())
    }
    assert of_tiles == {
        *("attention", "attention_codes", "gemm", "gemm_codes", "gemm_integers", "gemm_rounded"),
        "level",
    }


def test_sources_that_are_not_portable_have_an_object_per_level():
    for source in SOURCES:
        names = {compiler.object_name(source, level.flags) for level in LEVELS}
        assert len(names) == (1 if source.stem in compiler.PORTABLE else len(LEVELS))
