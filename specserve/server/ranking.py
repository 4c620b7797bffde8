"""POST /v1/rerank and /v1/score: scores of documents for a query."""

import secrets
import time
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from specserve.api.poolers import Ranker
from specserve.api.pooling import (
    check_instruction,
    pair_messages,
    pair_text,
    paired,
    ranker_of,
    score_of,
)
from specserve.errors import RequestError
from specserve.server.body import BodyKind, convert
from specserve.server.completion import Service
from specserve.server.pooling import PoolBody, Pooled, PooledRequest, pool, read_pooled
from specserve.server.protocol import (
    RankedDocument,
    RankedText,
    Ranking,
    Score,
    ScoreList,
)
from specserve.server.refusal import json_response
from specserve.text.chat_template import ChatOptions

MAX_PAIRS = 2048  # per request
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
    names = "text_1", "text_2"
    texts = texts_of(body.text_1, names[0]), texts_of(body.text_2, names[1])
    return body, checked(paired(*texts, names), "text_2")


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
    scores, found = await scored(request, asked, pairs, "documents")
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: asked.top_n]
    results = [RankedDocument(i, scores[i]) for i in order]
    if asked.return_documents:
        for each in results:
            each.document = RankedText(pairs[each.index][1])
    ranking = Ranking(f"rerank-{secrets.token_hex(12)}", found.model, results, found.usage)
    return json_response(ranking, headers=found.headers)


async def score(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    asked, pairs = await service.prompts.parse(await service.bodies.read(request), SCORE)
    scores, found = await scored(request, asked, pairs, "text_2")
    data = [Score(index=i, score=each) for i, each in enumerate(scores)]
    id, created = f"score-{secrets.token_hex(12)}", int(time.time())
    model, usage = found.model, found.usage
    answer = ScoreList(id=id, created=created, model=model, data=data, usage=usage)
    return json_response(answer, headers=found.headers)


async def scored(
    request: Request, asked: RankBody, pairs: Pairs, field: str
) -> tuple[list[float], Pooled]:
    """Return the scores of pairs, and the vectors that they are from."""
    service: Service = request.app.state.service
    ranker = ranker_of(service.poolers)
    prompts = await prompts_of(service, ranker, asked.instruction, pairs)
    is_plain = ranker.pooling.kind == "score"
    found = await pool(request, asked, PooledRequest(prompts, ranker.pooling, field, is_plain))
    return [score_of(each.tolist(), ranker) for each in found.vectors], found


async def prompts_of(
    service: Service, ranker: Ranker, instruction: str | None, pairs: Pairs
) -> list[str | list[int]]:
    """Return the prompt of each pair."""
    check_instruction(ranker, instruction)
    if ranker.pooling.kind == "score":
        encode = service.prompts.processor.encode_pair
        return [await service.prompts.in_thread(encode, *pair) for pair in pairs]
    if not ranker.has_template:
        return [pair_text(*pair, instruction) for pair in pairs]
    options = ChatOptions(add_generation_prompt=True)
    return [
        await service.prompts.render(pair_messages(*pair, instruction), options) for pair in pairs
    ]
