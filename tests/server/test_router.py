"""vllm-router before two servers: its policies, and a server that leaves."""

import contextlib
import socket
import subprocess
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.server.asking import CHAT, COMPLETIONS, chat_body, completion_body, streamed, whole
from tests.server.environments import python_with
from tests.server.server_process import ServerProcess, eventually

GENERATED, HITS = "vllm:generation_tokens_total", "vllm:prefix_cache_hits_total"
pytestmark = pytest.mark.slow


class Router(ServerProcess):
    """To be asked like a server."""

    headers = MappingProxyType({"Content-Type": "application/json"})  # which it insists on

    def __init__(self, policy, servers, flags, log):
        with contextlib.ExitStack() as stack:
            free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in "ab"]
            self.port, metrics = (each.getsockname()[1] for each in free)
        python = Path(python_with("vllm_router"))
        command = [python.with_name("vllm-router"), "--host=127.0.0.1", f"--port={self.port}"]
        command += ["--worker-urls", *(server.url for server in servers), f"--policy={policy}"]
        command += [f"--prometheus-port={metrics}", "--worker-startup-check-interval=1", *flags]
        self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self):
        eventually(self.is_ready, seconds=30)
        return self

    def is_ready(self):
        assert self.process.poll() is None, "the router has ended"
        with contextlib.suppress(OSError):
            return self.get("/health").status == 200
        return False


@contextlib.contextmanager
def two_servers(folder):
    python_with("vllm_router")  # skips before servers start
    starting = [ServerProcess(folder, "--served-model-name=tiny") for _ in range(2)]
    with starting[0] as first, starting[1] as second:
        yield first, second


@pytest.fixture(scope="module")
def servers(folder):
    with two_servers(folder) as servers:
        yield servers


@pytest.fixture
def routed(tmp_path):
    """Starts a router."""
    with (tmp_path / "log").open("w") as log, contextlib.ExitStack() as stack:
        yield lambda policy, servers, *flags: stack.enter_context(
            Router(policy, servers, flags, log)
        )


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_answers_are_those_of_a_server(servers, routed, policy):
    router = routed(policy, servers)
    for path, body in ((CHAT, chat_body()), (COMPLETIONS, completion_body())):
        want = whole(servers[0], path, body | {"temperature": 1, "seed": 5})
        for _ in range(2):
            assert whole(router, path, body | {"temperature": 1, "seed": 5}) == want
            assert streamed(router, path, body | {"temperature": 1, "seed": 5}) == want
    refused = router.post(CHAT, chat_body(temperature=-1))
    assert (refused.status, refused.body["error"]["param"]) == (400, "temperature")


def test_requests_in_turn_reach_both_servers(servers, routed):
    router = routed("round_robin", servers)
    before = [server.metric(GENERATED) for server in servers]
    for _ in range(4):
        whole(router, COMPLETIONS, completion_body(max_tokens=5))
    assert [server.metric(GENERATED) for server in servers] == [n + 10 for n in before]


def test_a_prompt_goes_where_its_prefix_is(servers, routed):
    to_the_idle = "--balance-abs-threshold=0", "--balance-rel-threshold=1"
    router = routed("cache_aware", servers, *to_the_idle)
    before = [server.metric(HITS) for server in servers]
    prompts = [f"{number} cats sat on {number} mats. " * 8 for number in range(2)]

    def cached(prompt, **asked):
        answer = router.post(COMPLETIONS, completion_body(prompt=prompt, **asked)).body
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with router.open_stream(COMPLETIONS, completion_body(prompt=prompts[0], max_tokens=300)) as one:
        next(one)
        assert cached(prompts[1]) == 0
        assert [*one][-1] == "[DONE]"
    assert all(cached(f"{prompt}And then") >= 64 for prompt in prompts)
    # Each of the two has one of the prompts.
    assert all(server.metric(HITS) >= n + 64 for server, n in zip(servers, before, strict=True))


def test_a_session_stays_with_its_server(servers, routed):
    router = routed("consistent_hash", servers)

    def answering(session):
        before = [server.metric(GENERATED) for server in servers]
        for number in range(3):
            body = completion_body(prompt=f"{number} cats", max_tokens=5)
            assert router.post(COMPLETIONS, body, headers={"X-Session-Id": session}).status == 200
        return [server.metric(GENERATED) - n for server, n in zip(servers, before, strict=True)]

    found = [answering(f"session {number}") for number in range(8)]
    assert {tuple(each) for each in found} == {(15, 0), (0, 15)}


def test_a_server_that_leaves_ends_its_streams_and_gets_no_more(folder, routed):
    with two_servers(folder) as servers:
        router = routed("round_robin", servers)
        long = completion_body(max_tokens=400)
        with (
            router.open_stream(COMPLETIONS, long) as one,
            router.open_stream(COMPLETIONS, long) as other,
        ):
            first, second = next(one), next(other)
            servers[0].signal()
            for events, chunk in ((one, first), (other, second)):
                *_, last, done = [chunk, *events]
                assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert servers[0].exit_code() == 0
        want = whole(servers[1], COMPLETIONS, completion_body(seed=5))
        for _ in range(6):
            assert whole(router, COMPLETIONS, completion_body(seed=5)) == want
