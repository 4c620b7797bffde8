"""vLLM for CPU, with its engine in this process."""

import json
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

from specserve_bench.peers.protocol import (
    DRAFT,
    PeerDrafting,
    Setup,
    Timed,
    read_setup,
    serve,
    timed_together,
)

STARTED = "SPECSERVE_BENCH_VLLM"  # marks the second start


class VLLM:
    def __init__(self, setup: Setup) -> None:
        import vllm

        self.version = str(vllm.__version__)
        self.vllm = vllm
        self.engine: Any = vllm.LLM(
            setup.model,
            dtype="bfloat16",
            max_model_len=setup.max_len,
            max_num_seqs=setup.max_requests,
            enable_prefix_caching=False,  # rounds repeat the prompts
            skip_tokenizer_init=True,
            speculative_config=speculation(setup.drafting),
        ).llm_engine
        self.ids = count()

    def together(self, prompts: list[list[int]], num_tokens: int) -> list[Timed]:
        params = self.vllm.SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self.vllm.sampling_params.RequestOutputKind.DELTA,
        )
        timed = {str(next(self.ids)): each for each in timed_together(len(prompts))}
        for name, prompt in zip(timed, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                timed[output.request_id].add(output.outputs[0].token_ids)
        return list(timed.values())


def environment(setup: Setup) -> dict[str, str]:
    """The environment of vLLM's workers, with Intel's OpenMP as its manual advises. The engine is
    in this process, so no step crosses a socket.
    """
    known = sorted(os.sched_getaffinity(0))
    cores = ",".join(map(str, known[: setup.threads or len(known)]))
    openmp = Path(sys.prefix, "lib", "libiomp5.so")  # comes with vLLM
    return {
        "LD_PRELOAD": str(openmp) if openmp.exists() else "",
        "OMP_NUM_THREADS": str(cores.count(",") + 1),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": str(-(-setup.kv_bytes // (1 << 30))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def speculation(drafting: PeerDrafting | None) -> dict[str, Any] | None:
    if drafting is None:
        return None
    if drafting.by == DRAFT:
        chosen: dict[str, Any] = {"method": "draft_model", "model": drafting.draft}
    else:
        chosen = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return chosen | {"num_speculative_tokens": drafting.tokens}


def restart(setup: Setup) -> None:
    """Start anew with the environment, as a library can only be preloaded at the start."""
    if STARTED not in os.environ:
        os.environ |= environment(setup) | {STARTED: "1"}
        os.execv(sys.executable, sys.orig_argv)


if __name__ == "__main__":
    restart(read_setup(json.loads(sys.argv[1])))
    serve(VLLM)
