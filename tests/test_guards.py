"""What would fail only after installation: a clash of package names, files missing in the wheel."""

import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specserve_kernels import cpu
from specserve_kernels.cpu.levels import LEVELS
from tests.installing import install, run

ROOT = Path(__file__).parents[1]

PROBE = """
import sys
from importlib.util import find_spec
sys.path.insert(0, {root!r})
import transformers
from transformers import LlamaForCausalLM
spec = find_spec("kernels")
assert spec is None or spec.origin is None, spec
ours = [
    name
    for name, module in sys.modules.items()
    if name.startswith(("specserve", "kernels")) and getattr(module, "__file__", None)
]
assert not ours, ours
"""


def test_transformers_finds_nothing_of_ours_to_import():
    run(sys.executable, "-c", PROBE.format(root=str(ROOT)), cwd=ROOT)


def build_wheel(folder, **env):
    """The wheel, and what was said while it was built."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    said = run(*command, cwd=ROOT, env=os.environ | env, stderr=subprocess.STDOUT)
    [path] = folder.glob("*.whl")
    return path, said


# Copies the library of this machine instead of compiling, which takes a minute of work a level.
COMPILER = """#!/bin/sh
{refuses}
[ "$1" = --version ] && exit
while [ "$1" != -o ]; do shift; done
cp {library} "$2"
"""


def copying_compiler(folder, refuses=""):
    compiler = folder / "c++"
    compiler.write_text(COMPILER.format(refuses=refuses, library=cpu.library()._name))
    compiler.chmod(0o755)
    return str(compiler)


@pytest.fixture(scope="module", params=["copied", pytest.param("compiled", marks=pytest.mark.slow)])
def wheel(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    env = {}
    if request.param == "copied":
        env = {"CXX": copying_compiler(folder), "XDG_CACHE_HOME": str(folder)}
    path, _ = build_wheel(folder, **env)
    return path


def libraries(wheel):
    """The names of levels for which a wheel has kernels."""
    names = zipfile.ZipFile(wheel).namelist()
    return {name.split("/")[-1].rpartition("-")[0] for name in names if name.endswith(".so")}


def test_the_wheel_has_four_packages_the_cpp_sources_and_the_demo_pair_without_its_evaluation(
    wheel,
):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "specserve",
        "specserve_bench",
        "specserve_drafters",
        "specserve_kernels",
    }
    sources = {f"specserve_kernels/cpu/{p.name}" for p in ROOT.glob("kernels/*/cpu/*.cpp")}
    assert sources
    assert sources <= set(names)
    assert not [name for name in names if name.endswith(".pyc")]
    demo = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("specserve/demo/**/*") if p.is_file()}
    assert demo <= set(names)
    assert not [name for name in names if "/evaluation/" in name or name.endswith(".jsonl")]


def test_the_wheel_has_kernels_for_the_usual_levels_and_names_its_platform(wheel):
    machine = platform.machine()
    assert libraries(wheel) == {level.name for level in LEVELS if level.machine == machine}
    assert wheel.name.endswith(f"_{machine}.whl")


# Of a compiler that does not know AMX.
NO_AMX = 'case "$*" in *-mamx-tile*) echo "unrecognized option" >&2; exit 1;; esac'


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86's")
def test_a_level_that_the_compiler_does_not_know_is_left_out_of_the_wheel(tmp_path):
    old = copying_compiler(tmp_path, NO_AMX)
    wheel, said = build_wheel(tmp_path, CXX=old, XDG_CACHE_HOME=str(tmp_path))
    names = {level.name for level in LEVELS if level.machine == "x86_64"}
    assert libraries(wheel) == names - {"x86-64-v4-amx"}
    assert "the wheel has no kernels for x86-64-v4-amx" in said and "unrecognized" in said


def test_a_wheel_that_is_built_without_a_compiler_has_no_kernels_and_fits_everywhere(tmp_path):
    wheel, said = build_wheel(tmp_path, CXX="no-such-compiler")
    assert libraries(wheel) == set() and wheel.name.endswith("-py3-none-any.whl")
    assert "the wheel has no kernels for" in said and "no C++ compiler found" in said


def test_the_wheel_installs_and_generates_two_tokens(wheel, tmp_path):
    python = install(wheel, tmp_path / "venv")
    home = run(python, "-c", "import specserve; print(specserve.__file__)", cwd=tmp_path)
    assert home.startswith(str(tmp_path))
    flags = ["--max-tokens", "2", "--temperature", "0", "--json"]
    output = run(python, "-m", "specserve", "generate", "def read", *flags, cwd=tmp_path)
    assert len(json.loads(output)["token_ids"]) == 2
    assert "bench" in run(python, "-m", "specserve", "--help", cwd=tmp_path)
    bare = os.environ | {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}  # no compiler
    bare.pop("CXX", None)
    said = run(python, "-m", "specserve_kernels.cpu", cwd=tmp_path, env=bare)
    assert "prebuilt for the best level that this CPU runs" in said
    again = run(python, "-m", "specserve", "generate", "def read", *flags, cwd=tmp_path, env=bare)
    assert json.loads(again)["token_ids"] == json.loads(output)["token_ids"]
