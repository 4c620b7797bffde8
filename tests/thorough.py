"""The tests that take longest: files, and all of the build for GPUs; `make test` has none."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
CI = {  # files by folder, run by CI after `make test`
    "": "parity",
    "api": "sleep",
    "bench": "doctor structured",
    "engine": "beams formats memory promise ranks recurrent recurrent_cache resume tiers",
    "equivalence": "matrix tools",
    "kernels": "row_invariance team",
    "memory": "blocks",
    "models": (
        "config_parity gguf gguf_layers gguf_mistakes hub_download preflight shards "
        "transformers_model"
    ),
    "scheduling": "fairness planner",
    "server": (
        "connections fuzzed_bodies grammars leaving prediction request_ids restart sleep "
        "speculation tls"
    ),
    "speculation": "head_model recurrent_draft tenants",
    "text/answer": "parsers",
}
LONGEST = {  # only by `make thorough`
    "": "guards start",
    "api": "async_llm",
    "bench": (
        "adapters commands gpu memory merged peers peers_adapters peers_gguf scale scaled_head soak"
    ),
    "cli": "completion quantize",
    "demo": "demo_head train_head",
    "deploy": "images systemd",
    "engine": "adapters cuda fork_server",
    "kernels": "coded cuda experts kv triton_sampling",
    "models": "adapters mtp_head",
    "server": (
        "access_log adapters answers bodies canaries control deadlines ending heads memory "
        "ranks remote_ranks responses sessions sleep_processes slow_readers tokens tools tracing"
    ),
    "server/page": "chat conversations dashboard look race streams texts",
    "speculation": "regret",
    "text/answer": "transcripts",
}
FIRST = {  # files that take longest, by folder: a worker that begins one late is the last to end
    "": "parity guards layers heads",
    "engine": "promise ranks memory recurrent",
    "equivalence": "matrix tools",
    "kernels": "row_invariance",
    "models": "parity",
    "server": "restart prediction routes connections",
    "speculation": "recurrent_draft head_model adaptive_speculator",
    "text/answer": "parsers",
}


def paths(files):
    return {
        ROOT / folder / f"test_{name}.py"
        for folder, names in files.items()
        for name in names.split()
    }


IN_CI, PATHS = paths(CI), paths(CI) | paths(LONGEST)
BEGINNING = paths(FIRST)


def sort_by_length(items):
    """Files of `FIRST` before all others; a file's own order stays."""
    items.sort(key=lambda item: item.path not in BEGINNING)


def mark_thorough(items):
    for item in items:
        # Triton's interpreter takes seconds for what a GPU does in microseconds.
        if item.path in PATHS or item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.thorough)
        if item.path in IN_CI and not item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.ci)
