"""A server with several rank processes: the same text, and the loss of any rank is a pause."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from specserve import LLM
from specserve.errors import ConfigError
from tests.adapters import write_adapter
from tests.server.asking import COMPLETIONS, completion_body, streamed, whole
from tests.server.server_process import ServerProcess, children_of, eventually

ASKED = COMPLETIONS, completion_body(max_tokens=300, temperature=1.0, seed=5)
ADAPTED = COMPLETIONS, completion_body(max_tokens=20, seed=1) | {"model": "adapted"}


class Ranked(ServerProcess):
    """A server with rank processes."""

    def __init__(self, folder, *args, **settings):
        super().__init__(
            folder, "--served-model-name=tiny", *args, **{"server.hang_seconds": 2.0} | settings
        )

    @property
    def ranks(self):
        """The process ids of ranks 1, 2, ..."""
        return sorted(children_of(self.engine_pid))


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    at = tmp_path_factory.mktemp("adapters") / "adapted"
    write_adapter(at, folder, scale=0.3)
    return f"--lora-modules=adapted={at}"


@pytest.fixture(scope="module")
def alone(folder, adapter):
    with ServerProcess(folder, "--served-model-name=tiny", adapter) as server:
        return streamed(server, *ASKED), whole(server, *ADAPTED)


@pytest.fixture(scope="module")
def ranked(folder, adapter):
    sizes = "--tensor-parallel-size=2", "--pipeline-parallel-size=2"
    with Ranked(folder, *sizes, adapter) as server:
        yield server


def test_the_text_is_that_of_one_process(ranked, alone):
    assert (streamed(ranked, *ASKED), whole(ranked, *ADAPTED)) == alone
    assert len(ranked.ranks) == 3


def test_hidden_states_in_the_last_stage_make_no_embeddings(ranked):
    refused = ranked.post("/v1/embeddings", {"input": "a"})
    assert refused.status == 400 and "parallel.pipeline = 1" in refused.body["error"]["message"]


@pytest.mark.parametrize(
    ("rank", "how"), [(1, signal.SIGKILL), (2, signal.SIGSEGV), (3, signal.SIGSTOP)]
)
def test_streams_go_on_after_the_loss_of_a_rank(ranked, alone, rank, how):
    lost, engine = ranked.ranks, ranked.engine_pid
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(streamed, ranked, *ASKED)
        eventually(lambda: ranked.metric("vllm:num_requests_running") == 1)
        os.kill(lost[rank - 1], how)
        assert answer.result() == alone[0]
    assert ranked.engine_pid != engine
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in lost))


def test_a_start_that_fails_leaves_no_rank_behind(folder):
    before = children_of(os.getpid())
    with pytest.raises(ConfigError, match=r"raise memory\.kv_bytes"):
        LLM(folder, tensor_parallel_size=2, kv_cache_memory_bytes=1 << 12)
    assert children_of(os.getpid()) == before
