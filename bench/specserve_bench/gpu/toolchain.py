"""Finds the tools with which FlashInfer compiles and links its kernels.

FlashInfer expects the toolkit two folders above `nvcc`, which is wrong for a wrapper in
/usr/local/bin. It also links with stubs that not every toolkit has.
"""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def toolchain(scratch: Path) -> dict[str, str]:
    """Environment variables for what could be found; links to it go into `scratch`."""
    home = next((h for h in homes() if (h / "include/cuda_runtime.h").exists()), None)
    if home is None:
        return {}
    links = scratch / "cuda"
    shutil.rmtree(links, ignore_errors=True)
    (links / "include").mkdir(parents=True)
    for name, folders in (
        ("libcuda.so", ["lib64/stubs", "targets/x86_64-linux/lib/stubs"]),
        ("libcudart.so", ["lib64", "targets/x86_64-linux/lib"]),
    ):
        found = library(name, [home / folder for folder in folders])
        if found is not None:
            (links / name).symlink_to(found)
    environment = {"CUDA_HOME": str(home), "FLASHINFER_EXTRA_LDFLAGS": f"-L{links}"}
    if not (home / "include/curand_kernel.h").exists():
        for header in Path(sysconfig.get_path("purelib")).glob("nvidia/*/include/curand*.h"):
            (links / "include" / header.name).symlink_to(header)
        environment["FLASHINFER_EXTRA_CUDAFLAGS"] = f"-I{links / 'include'}"
    return environment


def homes() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    yield Path("/usr/local/cuda")
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        yield Path(nvcc).resolve().parents[1]
    yield from sorted(Path("/usr/local").glob("cuda-*"), reverse=True)


def library(name: str, folders: list[Path]) -> Path | None:
    """In one of the folders, else where the loader finds it."""
    for folder in [*folders, Path("/usr/local/nvidia/lib64")]:
        for found in sorted(folder.glob(f"{name}*")):
            return found
    try:
        known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    except OSError:
        return None
    paths = [
        Path(line.split(" => ")[1]) for line in known.splitlines() if name in line.split(" ")[0]
    ]
    return paths[0] if paths else None
