"""The tests that take longest: files, and all of the build for GPUs; `make test` has none."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
CI = {  # files by folder, run by CI after `make test`
    "": "guards parity",
    "api": "sleep",
    "deploy": "images",
    "engine": "beams formats promise ranks recurrent recurrent_cache resume tiers",
    "equivalence": "matrix",
    "kernels": "row_invariance team",
    "memory": "blocks",
    "models": "gguf gguf_layers gguf_mistakes hub_download preflight shards transformers_model",
    "scheduling": "fairness planner",
    "server": "grammars memory prediction request_ids restart slow_readers speculation tls",
    "speculation": "head_model recurrent_draft tenants",
    "text/answer": "parsers transcripts",
}
LONGEST = {  # only by `make thorough`
    "": "start",
    "api": "async_llm",
    "bench": "commands gpu scale scaled_head",
    "cli": "completion quantize",
    "demo": "demo_head train_head",
    "engine": "adapters cuda fork_server",
    "kernels": "coded cuda experts kv triton_sampling",
    "models": "adapters mtp_head",
    "server": (
        "access_log adapters answers bodies canaries control deadlines ending heads "
        "ranks remote_ranks responses sessions sleep_processes tokens tools tracing"
    ),
    "server/page": "chat conversations dashboard look race streams texts",
    "speculation": "regret",
}


def paths(files):
    return {
        ROOT / folder / f"test_{name}.py"
        for folder, names in files.items()
        for name in names.split()
    }


IN_CI, PATHS = paths(CI), paths(CI) | paths(LONGEST)


def mark_thorough(items):
    for item in items:
        # Triton's interpreter takes seconds for what a GPU does in microseconds.
        if item.path in PATHS or item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.thorough)
        if item.path in IN_CI and not item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.ci)
