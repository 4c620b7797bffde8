"""Collects the wheels that a GPU machine without a network lacks, into a folder.

    python -m specserve_bench.gpu.wheels DIR

The list has a line for each: a requirement, its size in MB, and what needs it. The machine has
Python 3.12 on x86-64 Linux with torch (CUDA 13), Triton, transformers, peft and pytest.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

MOST_MB = 24  # of all wheels
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 38, 35, 34, 31, 28, 27, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]


class Wheel(NamedTuple):
    requirement: str
    megabytes: float
    purpose: str


def wheels() -> list[Wheel]:
    lines = Path(__file__).with_name("wheels.txt").read_text(encoding="utf-8").splitlines()
    fields = (line.split(maxsplit=2) for line in lines if line and not line.startswith("#"))
    return [Wheel(name, float(size), purpose) for name, size, purpose in fields]


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise SystemExit(__doc__)
    folder = Path(argv[0])
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    pip += ["--python-version", "3.12", "--implementation", "cp", "-d", str(folder)]
    for platform in PLATFORMS:
        pip += ["--platform", platform]
    subprocess.run([*pip, *(wheel.requirement for wheel in wheels())], check=True)
    total = sum(file.stat().st_size for file in folder.glob("*.whl")) / 1e6
    print(f"{folder}: {total:.1f} MB of {MOST_MB} MB")
    return 0 if total <= MOST_MB else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
