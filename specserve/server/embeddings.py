"""POST /v1/embeddings: converts texts to embeddings."""

import asyncio
import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from specserve.api.pooling import check_dimensions, embedder_of, prompt_of, vector_of
from specserve.errors import RequestError
from specserve.exchange.fair_queue import owner
from specserve.server.body import BodyKind
from specserve.server.completion import Service
from specserve.server.completions import PROMPTS, read_prompts
from specserve.server.logprobs import sealed
from specserve.server.pooling import PoolBody, Pooled, PooledRequest, pool, read_pooled
from specserve.server.protocol import Embedding, EmbeddingList
from specserve.server.refusal import json_response

if TYPE_CHECKING:  # see api/pooling.py
    import numpy as np
    from numpy.typing import NDArray

MAX_INPUTS = 2048  # per request, as in OpenAI's API


class EmbeddingsBody(PoolBody, frozen=True, kw_only=True):
    """Texts to convert to embeddings.

    input           a string, a list of token ids, or a list of up to 2048 of either
    encoding_format  float: numbers; base64: little-endian float32
    dimensions      length of the embeddings, which are cut and normalized again; unset: all
    prompt_name     one of the model's prompts, e.g. query; "": none; unset: the model's default
    add_special_tokens  the tokenizer adds special tokens to a text
    truncate        true cuts the end of a text that exceeds the context; false refuses it
    """

    input: str | Annotated[list[Any], PROMPTS] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    prompt_name: str | None = None
    add_special_tokens: bool = True
    truncate: bool = False


EmbeddingInputs = list[str | list[int]]


def read_embeddings(raw: bytes) -> tuple[EmbeddingsBody, EmbeddingInputs]:
    body = read_pooled(raw, EmbeddingsBody)
    inputs = read_prompts(body.input, "input")
    if len(inputs) > MAX_INPUTS:
        message = f"input: {len(inputs)} inputs. At most {MAX_INPUTS} are allowed"
        raise RequestError(message, "input")
    return body, inputs


EMBEDDINGS = BodyKind("embeddings", read_embeddings, tuple[EmbeddingsBody, EmbeddingInputs])


async def embeddings(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    asked, inputs = await service.prompts.parse(await service.bodies.read(request), EMBEDDINGS)
    found = await embed(request, asked, inputs)

    def write() -> Response:
        written = written_as(asked.encoding_format, found.vectors)
        answer = EmbeddingList(data=written, model=found.model, usage=found.usage)
        return json_response(answer, headers=found.headers)

    # A number takes about 100 ns, and an embedding has thousands.
    return await asyncio.wrap_future(service.writing_threads.submit(owner.get(), write))


async def embed(request: Request, asked: EmbeddingsBody, inputs: EmbeddingInputs) -> Pooled:
    """Return the embeddings of inputs, as the request wants them."""
    service: Service = request.app.state.service
    embedder = embedder_of(service.poolers, "/v1/rerank or /v1/score")
    check_dimensions(embedder, asked.dimensions)
    prompt = prompt_of(embedder, asked.prompt_name)
    texts = [prompt + each if isinstance(each, str) else each for each in inputs]
    how = asked.add_special_tokens, asked.truncate
    found = await pool(request, asked, PooledRequest(texts, embedder.pooling, "input", *how))
    vectors = [vector_of(embedder, each, asked.dimensions) for each in found.vectors]
    return found._replace(vectors=vectors)


def written_as(form: str, vectors: "Sequence[NDArray[np.float32]]") -> list[Embedding]:
    if form == "base64":
        texts = [base64.b64encode(each.astype("<f4").tobytes()).decode() for each in vectors]
        return [Embedding(index=i, embedding=text) for i, text in enumerate(texts)]
    # Encoding one by one lets other threads run in between.
    numbers = sealed(each.tolist() for each in vectors)
    return [Embedding(index=i, embedding=each) for i, each in enumerate(numbers)]
