"""specserve behind Ray Serve: each replica starts its own `specserve serve`.

Run this in an environment with specserve, and in this folder, so that Ray's processes find it:

    pip install 'ray[serve]==2.60.0'
    serve run ray_serve:app min_replicas=2 command="specserve serve path/to/model"
    curl http://127.0.0.1:8000/v1/models

The router sends a request to the replica that has cached most of its prompt, if the load allows.
Ray starts another replica if the running requests exceed the target. `Options` lists all settings.

A replica with several ranks reserves one machine with the resources of all ranks, or a machine for
each rank.
"""

import asyncio
import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import aiohttp
import ray
from pydantic import BaseModel, ConfigDict, PositiveInt, field_validator
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

# The public name in ray.serve.llm needs vLLM, so this is the internal name.
PREFIX_AWARE = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ".PrefixCacheAffinityRouter"
)
# The kernel ends the program when the thread that started it ends for any reason.
ENDS_WITH_ITS_STARTER = "setpriv", "--pdeathsig=TERM", "--"
RANK_FLAGS = re.compile(r"--(tensor|pipeline)-parallel-size|\bparallel\.")
READY = re.compile(rb"ready in [\d.]+ s at (http://\S+)")
# Headers that each hop sets itself. Ray's proxy also adds the request id to responses.
HOP_BY_HOP = {"connection", "content-length", "date", "host", "keep-alive", "server", "te"}
HOP_BY_HOP |= {"trailer", "transfer-encoding", "upgrade"}


class Options(BaseModel):
    """Settings: NAME=VALUE after `ray_serve:app`, or `args` in a config file of `serve deploy`."""

    model_config = ConfigDict(extra="forbid")

    command: str = "specserve serve"  # without --port and settings of ranks
    min_replicas: int = 1
    max_replicas: int = 4
    target_ongoing_requests: float = 8  # per replica; Ray scales up above it
    cpus: float = 1  # per rank, in Ray's accounting
    gpus: float = 0  # per rank
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    machine_per_rank: bool = False  # False: all ranks of a replica are on one machine

    @field_validator("command")
    @classmethod
    def check(cls, command: str) -> str:
        if "serve" not in shlex.split(command):
            raise ValueError("`command` does not run `specserve serve`")
        if RANK_FLAGS.search(command):
            raise ValueError("`command` sets ranks. Use tensor_parallel_size=N instead")
        return command

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def bundles(self) -> list[dict[str, float]]:
        """The resources of a replica on each of its machines. Rank 0 is on the first."""
        rank = {"CPU": self.cpus, "GPU": self.gpus}
        if self.machine_per_rank:
            return [rank] * self.num_ranks
        return [{name: amount * self.num_ranks for name, amount in rank.items()}]

    def serve_command(self) -> list[str]:
        command = shlex.split(self.command)
        if self.num_ranks == 1:
            return command
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        return [
            *command,
            f"--tensor-parallel-size={tensor}",
            f"--pipeline-parallel-size={pipeline}",
        ]

    def rank_command(self) -> list[str]:
        command = shlex.split(self.command)
        return [*command[: command.index("serve")], "rank"]


@dataclass(frozen=True)
class ProxiedRequest:
    """A request to pass on. Ray's router prefers the replica that has cached most of `prompt`."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    prompt: str


@ray.remote(max_restarts=-1, max_task_retries=-1)
class RemoteRank:
    """A rank on another machine than rank 0. Ray ends it with the replica that started it."""

    def run(self, command: list[str], secret: str) -> None:
        """Run a rank, and start it again whenever it ends."""
        program = [*ENDS_WITH_ITS_STARTER, *command, f"--secret-file={secret_file(secret)}"]
        while True:
            subprocess.run(program)
            time.sleep(1)


@serve.deployment
class Server:
    """A replica. It ends with its server, and its server ends with it."""

    async def __init__(self, options: Options) -> None:
        program = [*ENDS_WITH_ITS_STARTER, *options.serve_command(), "--port=0"]
        if len(options.bundles()) > 1:
            program += self.start_ranks(options)
        self.process = await asyncio.create_subprocess_exec(*program, stdout=PIPE)
        self.client = aiohttp.ClientSession(
            await self.address(), auto_decompress=False, timeout=aiohttp.ClientTimeout()
        )
        self.ending = asyncio.create_task(self.end_with_server())

    def start_ranks(self, options: Options) -> list[str]:
        """Start the other ranks, each on its machine. Return the flags by which rank 0 admits them.

        Ray hands over the secret, which is new for each replica.
        """
        address, secret = f"{get_node_ip_address()}:{free_port()}", secrets.token_hex()
        group = get_current_placement_group()
        self.ranks = []  # a rank ends when nothing refers to it
        for number in range(1, options.num_ranks):
            rank = RemoteRank.options(
                num_cpus=options.cpus,
                num_gpus=options.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            ).remote()
            rank.run.remote([*options.rank_command(), address, f"--rank={number}"], secret)
            self.ranks.append(rank)
        return [
            f"--set=parallel.address={address}",
            f"--set=parallel.secret_file={secret_file(secret)}",
        ]

    async def address(self) -> str:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if ready := READY.search(line):
                return ready[1].decode()
        raise RuntimeError(f"the server did not start: exit code {await self.process.wait()}")

    async def end_with_server(self) -> None:
        """Exit when the server exits, so that Ray uses other replicas and starts a new one."""
        await self.process.communicate()
        os._exit(1)

    async def check_health(self) -> None:
        async with self.client.get("/health/live") as response:
            response.raise_for_status()

    async def respond(
        self, request: ProxiedRequest
    ) -> AsyncIterator[tuple[int, dict[str, str]] | bytes]:
        """Yield the status and headers, then the body as it arrives.

        Ray closes the generator when the client disconnects. This closes the connection, and the
        server aborts the request.
        """
        async with self.client.request(
            request.method, request.path, headers=request.headers, data=request.body
        ) as response:
            yield response.status, passed_on(response.headers, HOP_BY_HOP | {"x-request-id"})
            async for part in response.content.iter_any():
                yield part


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000)
class Front:
    """Receives requests and passes each one to a replica."""

    def __init__(self, servers: DeploymentHandle) -> None:
        self.servers = servers.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        parts = self.servers.respond.remote(await proxied(request))
        try:
            status, headers = await anext(parts)
        except (RayError, RayServeException) as e:
            return unavailable(e)
        return StreamingResponse(until_left(parts), status, headers)


def free_port() -> int:
    """A port that is free now on the address of this machine."""
    with socket.create_server((get_node_ip_address(), 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def secret_file(secret: str) -> str:
    """Return the path of a file in memory, which only this user may read. It ends with this
    process.
    """
    number = os.memfd_create("specserve-secret")
    os.fchmod(number, 0o600)
    os.write(number, secret.encode())
    return f"/proc/{os.getpid()}/fd/{number}"


async def proxied(request: Request) -> ProxiedRequest:
    body, headers = await request.body(), passed_on(request.headers)
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return ProxiedRequest(request.method, path, headers, body, prompt_prefix(request, body))


def prompt_prefix(request: Request, body: bytes) -> str:
    """The text by which Ray's router chooses a replica. The router divides by its length, so it is
    never empty.

    A client may name the conversation with X-Session-Id or OpenAI's `prompt_cache_key`. The name
    comes first, so it decides.
    """
    try:
        fields = json.loads(body)
        prompt = next(fields[name] for name in ("messages", "prompt", "input") if name in fields)
    except (ValueError, TypeError, StopIteration):
        return request.url.path  # no valid prompt: the server returns the error
    hint = request.headers.get("x-session-id") or fields.get("prompt_cache_key") or ""
    return f"{hint}{json.dumps(prompt)}"


def passed_on(headers: Mapping[str, str], but: Set[str] = HOP_BY_HOP) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in but}


async def until_left(parts: Any) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            yield part
    finally:
        parts.cancel()


def unavailable(e: Exception) -> Response:
    """503 before any response began. Clients of OpenAI's API retry it."""
    error = {
        "message": f"No replica is available ({type(e).__name__}). Retry the request.",
        "type": "service_unavailable",
        "param": None,
        "code": "server_is_unavailable",
    }
    return JSONResponse({"error": error}, 503, {"Retry-After": "1"})


def app(options: Options) -> Application:
    target, bundles = options.target_ongoing_requests, options.bundles()
    servers = Server.options(
        ray_actor_options={"num_cpus": bundles[0]["CPU"], "num_gpus": bundles[0]["GPU"]},
        placement_group_bundles=bundles,
        placement_group_strategy="STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK",
        max_ongoing_requests=1000,  # the server queues and orders requests itself
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": target,
        },
        request_router_config=RequestRouterConfig(
            request_router_class=PREFIX_AWARE,
            request_router_kwargs={"imbalanced_threshold": target, "do_eviction": True},
        ),
    )
    return Front.bind(servers.bind(options))
