"""Small C++ programs in tests/kernels/native/ that are compiled with sources of the kernels."""

import subprocess
from pathlib import Path

from specserve_kernels.cpu.compiler import FLAGS, FOLDER, compiler

PROGRAMS = Path(__file__).parent / "native"


def compile_program(name, folder, sources, flags=(), compiler=compiler):
    """The path of a program; `sources` are those of the kernels that it needs."""
    files = PROGRAMS / f"{name}.cpp", *(FOLDER / source for source in sources)
    out = folder / name
    command = [*compiler(), *FLAGS, *flags, f"-I{FOLDER}", *files, "-o", out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def output(*command, timeout=60):
    command = list(map(str, command))
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
