"""POST /v1/rerank and /v1/score: scores of documents for a query."""

import math
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from specserve.api.poolers import Ranker
from specserve.errors import RequestError
from specserve.server.body import BodyKind, convert
from specserve.server.completion import Service
from specserve.server.pooling import PoolBody, PooledRequest, pool, read_pooled
from specserve.server.protocol import (
    PoolingUsage,
    RankedDocument,
    RankedText,
    Ranking,
    Score,
    ScoreList,
)
from specserve.server.refusal import json_response
from specserve.text.chat_template import ChatOptions

MAX_PAIRS = 2048  # per request
# The form of Qwen3-Reranker, for models whose chat template has no roles for a pair.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)

Texts = str | Annotated[list[Any], Meta(extra_json_schema={"items": {"type": "string"}})]


class RankBody(PoolBody, frozen=True, kw_only=True):
    """The fields of both routes.

    instruction     what makes a document relevant, for models that read it
    """

    instruction: str | None = None


class RerankBody(RankBody, frozen=True, kw_only=True):
    """A query, and documents to sort by their relevance.

    documents       up to 2048 texts, or objects with a text
    top_n           number of documents to return, the most relevant first; unset: all
    return_documents  the response repeats the documents' texts
    """

    query: str | None = None
    documents: list[Any] | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False


class ScoreBody(RankBody, frozen=True, kw_only=True):
    """Pairs of texts to score.

    text_1          the query, or one per text_2
    text_2          up to 2048 documents
    """

    text_1: Texts | None = None
    text_2: Texts | None = None


Pairs = list[tuple[str, str]]


def read_rerank(raw: bytes) -> tuple[RerankBody, Pairs]:
    body = read_pooled(raw, RerankBody)
    if body.query is None:
        raise RequestError("query: missing. Send a text", "query")
    documents = [text_of(each, f"documents[{i}]") for i, each in enumerate(body.documents or ())]
    return body, checked([(body.query, each) for each in documents], "documents")


def read_score(raw: bytes) -> tuple[ScoreBody, Pairs]:
    body = read_pooled(raw, ScoreBody)
    ones, twos = texts_of(body.text_1, "text_1"), texts_of(body.text_2, "text_2")
    if len(ones) not in (1, len(twos)):
        raise RequestError(
            f"text_1: {len(ones)} texts for {len(twos)} of text_2. Send one, or as many", "text_1"
        )
    pairs = zip(ones if len(ones) == len(twos) else ones * len(twos), twos, strict=True)
    return body, checked([*pairs], "text_2")


RERANK = BodyKind("rerank", read_rerank, tuple[RerankBody, Pairs])
SCORE = BodyKind("score", read_score, tuple[ScoreBody, Pairs])


def text_of(given: Any, path: str) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    return str(convert(text, str, path))


def texts_of(given: Texts | None, field: str) -> list[str]:
    if given is None:
        raise RequestError(f"{field}: missing. Send a text or a list of texts", field)
    texts: list[str] = [given] if isinstance(given, str) else convert(given, list[str], field)
    return texts


def checked(pairs: Pairs, field: str) -> Pairs:
    if not 1 <= len(pairs) <= MAX_PAIRS:
        message = f"{field}: {len(pairs)} texts. Send 1 to {MAX_PAIRS}"
        raise RequestError(message, field)
    return pairs


async def rerank(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    asked, pairs = await service.prompts.parse(await service.bodies.read(request), RERANK)
    scores, usage, model = await scored(request, asked, pairs, "documents")
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: asked.top_n]
    results = [RankedDocument(i, scores[i]) for i in order]
    if asked.return_documents:
        for each in results:
            each.document = RankedText(pairs[each.index][1])
    return json_response(Ranking(f"rerank-{secrets.token_hex(12)}", model, results, usage))


async def score(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    asked, pairs = await service.prompts.parse(await service.bodies.read(request), SCORE)
    scores, usage, model = await scored(request, asked, pairs, "text_2")
    data = [Score(index=i, score=each) for i, each in enumerate(scores)]
    id, created = f"score-{secrets.token_hex(12)}", int(time.time())
    return json_response(ScoreList(id=id, created=created, model=model, data=data, usage=usage))


async def scored(
    request: Request, asked: RankBody, pairs: Pairs, field: str
) -> tuple[list[float], PoolingUsage, str]:
    """Return the scores of pairs, the usage, and the model's name."""
    service: Service = request.app.state.service
    ranker = service.poolers.ranker
    if ranker is None:
        why = service.poolers.why_not if service.poolers.embedder is None else "it has embeddings"
        raise RequestError(
            f"no scores: the model is no ranker ({why}). Serve a ranker, or start with --task rank",
            "model",
        )
    prompts = await prompts_of(service, ranker, asked.instruction, pairs)
    is_plain = ranker.pooling.kind == "score"
    found = await pool(request, asked, PooledRequest(prompts, ranker.pooling, field, is_plain))
    return [number(each.tolist(), ranker) for each in found.vectors], found.usage, found.model


async def prompts_of(
    service: Service, ranker: Ranker, instruction: str | None, pairs: Pairs
) -> list[str | list[int]]:
    """Return the prompt of each pair."""
    if ranker.pooling.kind == "score":
        if instruction is not None:
            message = "instruction: this model reads none. Omit it"
            raise RequestError(message, "instruction")
        encode = service.prompts.processor.encode_pair
        return [await service.prompts.in_thread(encode, *pair) for pair in pairs]
    if not ranker.has_template:
        asked = instruction or INSTRUCTION
        return [PAIR.format(instruction=asked, query=q, document=d) for q, d in pairs]
    system = [] if instruction is None else [{"role": "system", "content": instruction}]
    options = ChatOptions(add_generation_prompt=True)
    return [
        await service.prompts.render(
            [*system, {"role": "query", "content": q}, {"role": "document", "content": d}], options
        )
        for q, d in pairs
    ]


def number(outputs: Sequence[float], ranker: Ranker) -> float:
    """Return the score of a pair: a classifier's output, or the log-odds of the relevant token."""
    raw = outputs[0] if len(outputs) == 1 else outputs[1] - outputs[0]
    if not ranker.squashes:
        return raw
    # Without overflow for either sign.
    return 1 / (1 + math.exp(-raw)) if raw > 0 else math.exp(raw) / (1 + math.exp(raw))
