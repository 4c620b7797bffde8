"""Runs prompts that are pooled instead of continued, for embeddings and scores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from specserve.config import Milliseconds
from specserve.exchange.sampling_params import Pooling, SamplingParams, pooled
from specserve.server.body import HARMLESS, checked_fields, decode_object, warning
from specserve.server.completion import LiveCompletion, Service, arrival
from specserve.server.prompt import blaming
from specserve.server.protocol import PoolingUsage
from specserve.server.stream import watched

if TYPE_CHECKING:  # see api/pooling.py
    import numpy as np
    from numpy.typing import NDArray

PLAIN = SamplingParams()


class PoolBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all routes that pool prompts."""

    model: str | None = None
    timeout_ms: Milliseconds | None = None


B = TypeVar("B", bound=PoolBody)


class Pooled(NamedTuple):
    """Vectors of prompts, and the name of the model or adapter that made them."""

    vectors: "list[NDArray[np.float32]]"
    usage: PoolingUsage
    model: str
    headers: dict[str, str] = {}  # noqa: RUF012  # a warning about ignored fields


class PooledRequest(NamedTuple):
    """Prompts to pool. Errors name `field`."""

    prompts: Sequence[str | list[int]]
    pooling: Pooling
    field: str
    adds_special: bool = True
    is_cut: bool = False  # texts that are too long lose their ends; else they are errors


def read_pooled(raw: bytes, kind: type[B]) -> B:
    given = {key: value for key, value in decode_object(raw).items() if key not in HARMLESS}
    return checked_fields(given, kind)


async def pool(request: Request, asked: PoolBody, job: PooledRequest) -> Pooled:
    """Run all prompts, at most `server.max_prompts` at a time, next to running streams."""
    import numpy as np

    service: Service = request.app.state.service
    arrived = arrival(request)._replace(adapter=service.check_model(asked.model))
    vectors = list["NDArray[np.float32]"]()
    num_tokens, most = 0, service.limits.max_prompts
    async with service.timed(arrived, asked.timeout_ms) as arrived:
        for first in range(0, len(job.prompts), most):
            ids = await read(service, job, job.prompts[first : first + most])
            resolved = pooled(job.pooling)
            completion = await service.admit(ids, PLAIN, resolved, arrived, job.field)
            await ended(request, completion)
            vectors += [np.frombuffer(g.pooled, "<f4") for g in completion.generations]
            num_tokens += completion.num_prompt_tokens
    usage = PoolingUsage(num_tokens, num_tokens)
    past = warning(service.ignored_fields(asked.model))
    return Pooled(vectors, usage, service.served_to(arrived).model, past)


async def ended(request: Request, completion: LiveCompletion) -> None:
    """Wait for the end. Raise the error of a completion that fails."""
    async with watched(completion, request.receive):
        await completion.over()
    if completion.has_left:
        raise ClientDisconnect
    if completion.error is not None:
        raise completion.error


async def read(
    service: Service, job: PooledRequest, prompts: Sequence[str | list[int]]
) -> list[list[int]]:
    """Return the tokens of prompts of text or ids."""
    processor, in_thread = service.prompts.processor, service.prompts.in_thread
    with blaming(job.field):
        if not job.is_cut:
            return [await in_thread(processor.read, p, None, job.adds_special) for p in prompts]
        return [await in_thread(processor.read_beginning, p, job.adds_special) for p in prompts]
