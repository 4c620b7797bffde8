"""Before and around the kernels: the process's settings, and a machine without a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specserve_kernels import cpu
from specserve_kernels.cpu.compiler import compiler
from tests.checkpoints import tiny_checkpoint

AT_TORCH = """
import os, resource, sys

def faults_of_fresh_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":  # it is about to be imported: show the settings made before
            faults_of_fresh_memory()
            print(os.environ["OMP_WAIT_POLICY"], faults_of_fresh_memory())
            sys.exit()

sys.meta_path.insert(0, Stop())
from specserve import LLM
"""

GENERATE = """
import sys
from specserve import LLM, SamplingParams
with LLM(sys.argv[1], set={"memory.kv_bytes": 1 << 24}, progress=False) as llm:
    [output] = llm.generate("the cat", SamplingParams(max_tokens=3, seed=1))
    print(llm.engine.target.ops.__name__, output.token_ids)
"""


def run(code, *args, **env):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize(("env", "policy"), [("", "passive"), ("active", "active")])
def test_the_process_is_settled_before_torch_comes_and_the_users_word_wins(env, policy):
    code = AT_TORCH if env else "import os; os.environ.pop('OMP_WAIT_POLICY', None)" + AT_TORCH
    said, faults = run(code, OMP_WAIT_POLICY=env).stdout.split()
    assert said == policy
    assert int(faults) < 100, "freed memory went back to the system, and is faulted in again"


def test_without_a_compiler_the_reference_serves_with_one_warning_line(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", seed=1)
    env = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    slow, fast = run(GENERATE, folder, **env), run(GENERATE, folder)
    assert slow.stderr.count("\n") == 1 and "no C++ compiler" in slow.stderr
    assert slow.stdout == fast.stdout.replace(".cpu", ".reference")


LOAD = "import torch, specserve_kernels as k; print(k.load(torch.device('cpu')).__name__)"
HOMELESS = f"""
import os, pwd, torch
os.environ.pop("HOME")
os.environ.pop("XDG_CACHE_HOME")
pwd.getpwuid = {{}}.__getitem__
{LOAD}
"""


COPYING_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec {compiler} --version
while [ "$1" != -o ]; do shift; done
cp {library} "$2"
"""


@pytest.fixture
def copying(tmp_path):
    """A compiler that copies: compiling what has been compiled once takes seconds."""
    path, whole = tmp_path / "c++", cpu.library()._name
    path.write_text(COPYING_COMPILER.format(compiler=" ".join(compiler()), library=whole))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("code", "folder"),
    [
        pytest.param(LOAD, "/dev/null/x", id="below a file"),
        pytest.param(LOAD, "/proc/1/x", id="where nobody may write", marks=pytest.mark.slow),
        pytest.param(HOMELESS, "", id="no home", marks=pytest.mark.slow),
    ],
)
def test_without_a_cache_folder_a_private_temporary_one_has_the_kernels(
    tmp_path, copying, code, folder
):
    env = {"XDG_CACHE_HOME": folder, "TMPDIR": str(tmp_path), "CXX": copying}
    for said in 1, 0:  # lines: the second start finds what the first has compiled
        done = run(code, **env)
        assert done.stdout == "specserve_kernels.cpu\n"
        assert done.stderr.count("set XDG_CACHE_HOME to change that") == said
    own = tmp_path / f"specserve-{os.geteuid()}"
    assert own.stat().st_mode & 0o777 == 0o700


def test_without_a_private_folder_the_reference_serves_with_one_warning_line(tmp_path, copying):
    own = tmp_path / f"specserve-{os.geteuid()}"
    own.mkdir()
    own.chmod(0o770)
    done = run(LOAD, XDG_CACHE_HOME="/dev/null/x", TMPDIR=str(tmp_path), CXX=copying)
    assert done.stdout == "specserve_kernels.reference\n"
    assert done.stderr.count("\n") == 1 and "Set XDG_CACHE_HOME" in done.stderr
    assert list(own.iterdir()) == []


@pytest.mark.parametrize("kept", [0.5, 0.0], ids=["half of it", "a few zeros"])
def test_a_spoilt_library_in_the_cache_is_compiled_afresh(tmp_path, copying, kept):
    whole = Path(cpu.library()._name)
    path = tmp_path / "specserve" / whole.name
    path.parent.mkdir()
    path.write_bytes(whole.read_bytes()[: int(kept * whole.stat().st_size)] or bytes(99))
    done = run(LOAD, CXX=copying, XDG_CACHE_HOME=str(tmp_path))
    said = "Compiling the C++ kernels for this CPU once, in about 15 s\n"
    assert (done.stdout, done.stderr) == ("specserve_kernels.cpu\n", said)
    assert path.stat().st_size == whole.stat().st_size


def test_a_compiler_that_fails_is_no_reason_to_fail(tmp_path):
    done = run(LOAD, CXX="false", XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout == "specserve_kernels.reference\n"
    assert list((tmp_path / "specserve").iterdir()) == []


CLOSED = """
import os, sys
from specserve.process import ensure_streams, tell
ensure_streams()
tell("to nobody"), tell("to nobody", number=1)
numbers = os.pipe()
os._exit(0 if min(numbers) > 2 and sys.stdin.read() == "" else 1)
"""


def test_streams_that_the_caller_closed_are_nobodys_sockets():
    shell = f"exec {sys.executable} -c '{CLOSED}' <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell]).returncode == 0
