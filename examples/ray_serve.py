"""Servers behind Ray Serve: each replica has a `specserve serve` of its own.

In an environment that has specserve, and in this folder, so that Ray's processes find this file:

    pip install 'ray[serve]==2.60.0'
    serve run ray_serve:app min_replicas=2 command="specserve serve path/to/model"
    curl http://127.0.0.1:8000/v1/models

A request goes to the server that has answered its beginning, as far as the load allows. Where more
requests run than a replica is to have, Ray starts another one. `Options` has all that can be set.
"""

import asyncio
import json
import os
import re
import shlex
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

# Its public name, in ray.serve.llm, cannot be imported without vLLM.
PREFIX_AWARE = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ".PrefixCacheAffinityRouter"
)
READY = re.compile(rb"ready in [\d.]+ s at (http://\S+)")
# Each hop has its own, and Ray's proxy adds the request's id to answers.
OF_A_HOP = {"connection", "content-length", "date", "host", "keep-alive", "server", "te"}
OF_A_HOP |= {"trailer", "transfer-encoding", "upgrade"}


class Options(BaseModel):
    """NAME=VALUE after `ray_serve:app`, or `args` of a file for `serve deploy`."""

    model_config = ConfigDict(extra="forbid")

    command: str = "specserve serve"  # without --port
    min_replicas: int = 1
    max_replicas: int = 4
    target_ongoing_requests: float = 8  # of a replica; more of them start another one
    cpus: float = 1  # of a replica, as Ray counts them
    gpus: float = 0


@dataclass(frozen=True)
class Asked:
    """A request. Ray's router looks for the replica that knows most of `prompt`."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    prompt: str


@serve.deployment
class Server:
    """A replica: neither it nor its server outlives the other."""

    async def __init__(self, command: str) -> None:
        # The operating system ends the server with this process, whatever that dies of.
        program = ["setpriv", "--pdeathsig=TERM", "--", *shlex.split(command), "--port=0"]
        self.process = await asyncio.create_subprocess_exec(*program, stdout=PIPE)
        self.client = aiohttp.ClientSession(
            await self.address(), auto_decompress=False, timeout=aiohttp.ClientTimeout()
        )
        self.ending = asyncio.create_task(self.end_with_server())

    async def address(self) -> str:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if ready := READY.search(line):
                return ready[1].decode()
        raise RuntimeError(f"the server did not start: exit code {await self.process.wait()}")

    async def end_with_server(self) -> None:
        """Ray asks other replicas as soon as this process is gone, and starts another one."""
        await self.process.communicate()
        os._exit(1)

    async def check_health(self) -> None:
        async with self.client.get("/health/live") as response:
            response.raise_for_status()

    async def answer(self, asked: Asked) -> AsyncIterator[tuple[int, dict[str, str]] | bytes]:
        """The status and the headers, then the body as it comes.

        Ray closes it when the client leaves: that closes the connection, and the server drops the
        request.
        """
        async with self.client.request(
            asked.method, asked.path, headers=asked.headers, data=asked.body
        ) as response:
            yield response.status, passed_on(response.headers, OF_A_HOP | {"x-request-id"})
            async for part in response.content.iter_any():
                yield part


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000)
class Front:
    """Takes requests in and passes each to a server."""

    def __init__(self, servers: DeploymentHandle) -> None:
        self.servers = servers.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        parts = self.servers.answer.remote(await asked_by(request))
        try:
            status, headers = await anext(parts)
        except (RayError, RayServeException) as e:
            return unavailable(e)
        return StreamingResponse(until_left(parts), status, headers)


async def asked_by(request: Request) -> Asked:
    body, headers = await request.body(), passed_on(request.headers)
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return Asked(request.method, path, headers, body, beginning(request, body))


def beginning(request: Request, body: bytes) -> str:
    """What requests for one replica begin with. Never empty: Ray's router divides by its length.

    A client may name the conversation by X-Session-Id or by OpenAI's `prompt_cache_key`: what comes
    first decides.
    """
    try:
        fields = json.loads(body)
        prompt = next(fields[name] for name in ("messages", "prompt", "input") if name in fields)
    except (ValueError, TypeError, StopIteration):
        return request.url.path  # no prompt, or none that a server will take
    hint = request.headers.get("x-session-id") or fields.get("prompt_cache_key") or ""
    return f"{hint}{json.dumps(prompt)}"


def passed_on(headers: Mapping[str, str], but: Set[str] = OF_A_HOP) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in but}


async def until_left(parts: Any) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            yield part
    finally:
        parts.cancel()


def unavailable(e: Exception) -> Response:
    """No server has begun to answer; clients of OpenAI's API ask again by themselves."""
    error = {
        "message": f"no server could answer ({type(e).__name__}): ask again",
        "type": "service_unavailable",
        "param": None,
        "code": "server_is_unavailable",
    }
    return JSONResponse({"error": error}, 503, {"Retry-After": "1"})


def app(options: Options) -> Application:
    target = options.target_ongoing_requests
    servers = Server.options(
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        max_ongoing_requests=1000,  # the server has a queue, which it orders by its own rules
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
    return Front.bind(servers.bind(options.command))
