"""The tests that take longest: files, and all of the build for GPUs; `make test` has none."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
FILES = {  # by folder; each took ten seconds or more of two cores' time
    "": "guards parity start",
    "api": "async_llm",
    "bench": "commands gpu scale",
    "cli": "completion quantize",
    "engine": "adapters cuda fork_server",
    "equivalence": "matrix",
    "kernels": "coded cuda experts kv triton_sampling",
    "models": "adapters gguf_mistakes mtp_head preflight",
    "server": (
        "access_log adapters answers bodies canaries control deadlines ending heads "
        "ranks remote_ranks responses restart sessions sleep_processes tokens tools tracing"
    ),
    "server/page": "chat conversations dashboard look race streams texts",
    "speculation": "regret",
}
PATHS = {
    ROOT / folder / f"test_{name}.py" for folder, names in FILES.items() for name in names.split()
}


def mark_thorough(items):
    for item in items:
        # Triton's interpreter takes seconds for what a GPU does in microseconds.
        if item.path in PATHS or item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.thorough)
