"""Two demo servers behind each router of examples/: what passes through, and what a death costs."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.server.asking import (
    CHAT,
    COMPLETIONS,
    chat_body,
    completion_body,
    said,
    started,
    streamed,
    whole,
)
from tests.server.environments import python_with
from tests.server.server_process import (
    SETTINGS,
    ServerProcess,
    children_of,
    eventually,
    with_paths,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
FLAGS = [f"--set={name}={value}" for name, value in SETTINGS.items()]
RUNNING, HITS = "vllm:num_requests_running", "vllm:prefix_cache_hits_total"
HINTS = {"prompt_cache_key": "mine"}
pytestmark = pytest.mark.slow


class Behind(ServerProcess):
    """A server that something else has started."""

    def __init__(self, pid):
        self.pid, self.port = pid, port_of(pid)


class Router(ServerProcess):
    """To be asked like a server; it has started those behind it."""

    headers = MappingProxyType({"Content-Type": "application/json"})  # which vllm-router insists on

    def __init__(self, command, port, log, env, **where):
        self.port = port
        self.process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | with_paths(env), **where
        )

    def __enter__(self):
        try:
            eventually(self.is_ready, seconds=240)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        """The servers end with the router."""
        started = self.pids()
        self.signal()
        self.process.wait(60)
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))

    def is_ready(self):
        assert self.process.poll() is None, "the router has ended"
        with contextlib.suppress(OSError, http.client.HTTPException):
            return len(self.pids()) == 2 and self.get("/v1/models").status == 200
        return False

    def pids(self):
        serving = re.compile(rb"specserve\0serve\0")
        return [pid for pid in below(self.process.pid) if serving.search(command_line(pid))]

    def servers(self):
        return [Behind(pid) for pid in self.pids()]

    def wait_until_idle(self, seconds=5):
        for server in self.servers():
            server.wait_until_idle(seconds)

    def num_running(self):
        return [server.metric(RUNNING) for server in self.servers()]


def below(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        for child in children_of(pid):
            yield child
            yield from below(child)


def command_line(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def port_of(pid):
    """Where a process listens."""
    own = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]": row[1] for row in rows if row[3] == "0A"}
    [address] = [listening[name] for name in own & {*listening}]
    return int(address.rpartition(":")[2], 16)


def vllm_router(folder, log):
    programs = Path(sys.executable).parent, Path(python_with("vllm_router")).parent
    path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
    port = free_ports(4)
    command = [EXAMPLES / "vllm-router/start.sh", str(port), *FLAGS]
    return Router(command, port, log, {"PATH": path})


def ray_serve(folder, log):
    port = free_ports(1)
    options = {
        "command": " ".join([sys.executable, "-m", "specserve", "serve", *FLAGS]),
        "min_replicas": 2,
        "max_replicas": 2,
        "cpus": 0.5,
    }
    example = {"name": "specserve", "route_prefix": "/", "import_path": "ray_serve:app"}
    config = {"http_options": {"port": port}, "applications": [example | {"args": options}]}
    (folder / "config.yaml").write_text(json.dumps(config))  # which is YAML, too
    command = [Path(python_with("ray_serve")).with_name("serve"), "run", folder / "config.yaml"]
    env = {"HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(EXAMPLES)}
    return Router(command, port, log, env)


def free_ports(number):
    """The first of so many that follow each other; clients get theirs above."""
    while True:
        first = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


@pytest.fixture(scope="module", params=[vllm_router, ray_serve], ids=lambda start: start.__name__)
def router(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("router")
    with (folder / "log").open("w") as log, request.param(folder, log) as router:
        yield router


def test_the_chart_and_the_examples_name_options_and_versions_that_there_are():
    script = (EXAMPLES / "vllm-router/start.sh").read_text()
    [behind] = re.findall(r"^vllm-router (.*?)&$", script, re.MULTILINE | re.DOTALL)
    chart = EXAMPLES.parent / "deploy/helm/specserve/templates/router.yaml"
    pods = "\n".join(re.findall(r"^ +- --.*$", chart.read_text(), re.MULTILINE))
    python = python_with("vllm_router")
    command = [python, "-m", "vllm_router.launch_router", "--help"]
    told = subprocess.run(command, capture_output=True, text=True).stdout
    options = {*re.findall(r"--[a-z-]+", f"{pods}\n{behind}")}
    assert len(options) > 10 and options <= {*re.findall(r"--[a-z-]+", told)}
    pinned = (Path(__file__).parent / "python/vllm_router.txt").read_text().splitlines()
    assert {*(EXAMPLES / "vllm-router/requirements.txt").read_text().splitlines()} <= {*pinned}
    ray = (Path(__file__).parent / "python/ray_serve.txt").read_text().splitlines()
    [version] = re.findall(r"ray\[serve\]==([\d.]+)", (EXAMPLES / "ray_serve.py").read_text())
    assert f"ray=={version}" in ray


SHAPE = """
import json, ray_serve
app = ray_serve.app(ray_serve.Options(**json.loads(input())))
[servers] = app._bound_deployment.init_args
server = servers._bound_deployment
actor, [options] = server._replica_config, server.init_args
print(json.dumps([actor.placement_group_bundles, actor.placement_group_strategy,
    actor.ray_actor_options, options.serve_command(), options.rank_command()]))
"""


@pytest.mark.parametrize("machine_per_rank", [False, True])
def test_a_replica_on_ray_reserves_the_resources_of_all_its_ranks(machine_per_rank):
    asked = {"command": "python -m specserve serve m", "cpus": 3, "gpus": 1}
    asked |= {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    told = shape(asked | {"machine_per_rank": machine_per_rank})
    bundles, strategy, rank_0, serve, rank = json.loads(told.stdout)
    if machine_per_rank:
        assert (bundles, strategy) == ([{"CPU": 3, "GPU": 1}] * 4, "STRICT_SPREAD")
    else:
        assert (bundles, strategy) == ([{"CPU": 12, "GPU": 4}], "STRICT_PACK")
    assert (rank_0["num_cpus"], rank_0["num_gpus"]) == (bundles[0]["CPU"], bundles[0]["GPU"])
    assert serve[-2:] == ["--tensor-parallel-size=2", "--pipeline-parallel-size=2"]
    assert rank == ["python", "-m", "specserve", "rank"]


def test_a_command_with_ranks_of_its_own_is_refused():
    told = shape({"command": "specserve serve --tensor-parallel-size 2"})
    assert told.returncode and "Use tensor_parallel_size=N instead" in told.stderr


def shape(options):
    """What Ray would get, without Ray's processes."""
    return subprocess.run(
        [python_with("ray_serve"), "-c", SHAPE],
        input=json.dumps(options),
        env=os.environ | {"PYTHONPATH": str(EXAMPLES)},
        capture_output=True,
        text=True,
    )


def test_answers_and_streams_are_those_of_a_server(router):
    server, _ = router.servers()
    for path, body in ((CHAT, chat_body()), (COMPLETIONS, completion_body())):
        body |= {"temperature": 1, "seed": 5}
        want = whole(server, path, body)
        for _ in range(2):
            assert whole(router, path, body) == want
            assert streamed(router, path, body) == want


def test_the_events_of_a_stream_come_while_others_are_made(router):
    with router.open_stream(COMPLETIONS, completion_body(max_tokens=1000)) as events:
        next(events)
        assert sum(router.num_running()) == 1
        assert [*events][-1] == "[DONE]"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, chat_body(temperature=-1), 400),
        (COMPLETIONS, completion_body(max_tokens=0), 400),
        (COMPLETIONS, completion_body(return_hidden_states=True), 400),
        (COMPLETIONS, completion_body(stream=True, top_p=7), 400),
        ("/v1/responses", {"input": "the cat", "temprature": 1}, 400),
        (CHAT, chat_body(model="another"), 404),
        ("/v1/nothing", {}, 404),
    ],
)
def test_refusals_are_those_of_a_server(router, path, body, status):
    server, _ = router.servers()
    told, want = router.post(path, body), server.post(path, body)
    # vllm-router calls a refused stream's error an event stream, which it is not.
    error = json.loads(told.body) if isinstance(told.body, str) else told.body
    assert (told.status, error) == (want.status, want.body)
    assert told.status == status and error["error"]["type"] == "invalid_request_error"


def test_hints_for_the_router_change_no_answer(router):
    asked = {"seed": 5, "temperature": 1}
    bodies = {CHAT: chat_body(**asked), COMPLETIONS: completion_body(**asked)}
    for path, body in bodies.items():
        want = whole(router, path, body)[0][0]
        told = router.post(path, body | HINTS, headers={"X-Session-Id": "mine"})
        assert (told.status, said(told.body["choices"][0])) == (200, want[0])
    response = {"input": "the cat", "max_output_tokens": 16}
    told = router.post("/v1/responses", response | HINTS, headers={"X-Session-Id": "mine"})
    assert (told.status, told.body["prompt_cache_key"]) == (200, "mine")


def test_a_client_that_leaves_ends_its_request(router):
    long = completion_body(max_tokens=4000)
    with router.open_stream(COMPLETIONS, long) as events:
        next(events)
        assert sum(router.num_running()) == 1
    router.wait_until_idle()


def test_a_client_that_leaves_before_a_whole_answer_ends_its_request(router):
    with started(router, completion_body(max_tokens=4000)):
        eventually(lambda: sum(router.num_running()) == 1)
    router.wait_until_idle()


def test_a_prompt_goes_where_its_beginning_is(router):
    before = [server.metric(HITS) for server in router.servers()]
    for _ in range(4):
        for name in ("cats", "mats"):
            router.post(COMPLETIONS, completion_body(prompt=f"{name} and {name} " * 20))
    found = [s.metric(HITS) - n for s, n in zip(router.servers(), before, strict=True)]
    assert sum(found) >= 6 * 64


def test_a_server_that_is_killed_under_load_cuts_its_own_streams_alone(router):
    bodies = [
        completion_body(prompt=f"{n} cats sat on {n} mats. ", seed=n, temperature=1, max_tokens=300)
        for n in range(8)
    ]
    killed, other = router.servers()
    want = [whole(other, COMPLETIONS, body)[0][0][0] for body in bodies]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(router.open_stream(COMPLETIONS, body)) for body in bodies]
        firsts = [next(events) for events in streams]
        num_killed, num_whole = router.num_running()
        os.kill(killed.pid, signal.SIGKILL)
        heard = [[first, *rest(events)] for first, events in zip(firsts, streams, strict=True)]
    texts = ["".join(map(text, events)) for events in heard]
    ended = [events[-1] == "[DONE]" for events in heard]
    assert num_killed > 0 and num_whole > 0 and num_killed + num_whole == len(bodies)
    assert sum(ended) == num_whole
    assert all(
        text == whole if is_whole else whole.startswith(text)
        for text, whole, is_whole in zip(texts, want, ended, strict=True)
    )
    assert [whole(router, COMPLETIONS, body)[0][0][0] for body in bodies] == want


def rest(events):
    """Until they end, or are cut."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        yield from events


def text(event):
    choices = [] if event == "[DONE]" else event.get("choices", [])
    return "".join(map(said, choices))
