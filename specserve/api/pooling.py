"""Embeddings and scores: prompts of pairs, vectors, and the outputs of `LLM`."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from specserve.api.input_processor import InputProcessor
from specserve.api.outputs import Generation
from specserve.api.poolers import Embedder, Poolers, Ranker
from specserve.errors import RequestError
from specserve.text.chat_template import ChatOptions

if TYPE_CHECKING:  # numpy takes long to import, and most servers have no embeddings
    import numpy as np
    from numpy.typing import NDArray

# The form of Qwen3-Reranker, for models whose chat template has no roles for a pair.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
MAX_ECHO = 100  # characters of the input that an error repeats


class EmbeddingOutput(msgspec.Struct, frozen=True):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class EmbeddingRequestOutput(msgspec.Struct, frozen=True):
    """The embedding of a prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


class ScoringOutput(msgspec.Struct, frozen=True):
    score: float


class ScoringRequestOutput(msgspec.Struct, frozen=True):
    """The score of a pair of texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


def embedder_of(poolers: Poolers, instead: str) -> Embedder:
    """RequestError if the model has no embeddings; `instead` is the remedy for a ranker."""
    if poolers.embedder is None:
        why = poolers.why_not or f"the model ranks documents. Use {instead}"
        raise RequestError(f"no embeddings: {why}", "model")
    return poolers.embedder


def ranker_of(poolers: Poolers) -> Ranker:
    if poolers.ranker is None:
        why = poolers.why_not if poolers.embedder is None else "it has embeddings"
        raise RequestError(
            f"no scores: the model is no ranker ({why}). Use a ranker, or set the task rank",
            "model",
        )
    return poolers.ranker


def check_dimensions(embedder: Embedder, dimensions: int | None) -> None:
    if dimensions is not None and not 1 <= dimensions <= embedder.size:
        raise RequestError(
            f"dimensions = {dimensions}: the model's embeddings have {embedder.size} numbers. Send "
            f"1 to {embedder.size}, or omit it",
            "dimensions",
        )


def prompt_of(embedder: Embedder, name: str | None) -> str:
    """Return the text before an input."""
    if name is None:
        return embedder.default
    if name and name not in embedder.prompts:
        known = ", ".join(embedder.prompts) or "none"
        raise RequestError(
            f"prompt_name: {name[:MAX_ECHO]!r} is unknown. The model's prompts are: "
            f"{known[:MAX_ECHO]}",
            "prompt_name",
        )
    return embedder.prompts.get(name, "")


def pooled_vector(generation: Generation) -> "NDArray[np.float32]":
    """Return the vector of a prompt that was pooled."""
    import numpy as np

    return np.frombuffer(generation.pooled, "<f4")


def vector_of(
    embedder: Embedder, whole: "NDArray[np.float32]", dimensions: int | None
) -> "NDArray[np.float32]":
    """Return an embedding with the model's length, or cut to `dimensions` and normalized again."""
    vector = whole[:dimensions]
    return normalized(vector) if embedder.normalizes or dimensions is not None else vector


def normalized(vector: "NDArray[np.float32]") -> "NDArray[np.float32]":
    import numpy as np

    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector if length == 0 else (vector / length).astype(np.float32)


def pair_messages(query: str, document: str, instruction: str | None) -> list[dict[str, str]]:
    """Return a pair as messages, for a chat template that has its roles."""
    system = [] if instruction is None else [{"role": "system", "content": instruction}]
    pair = {"role": "query", "content": query}, {"role": "document", "content": document}
    return [*system, *pair]


def pair_text(query: str, document: str, instruction: str | None) -> str:
    return PAIR.format(instruction=instruction or INSTRUCTION, query=query, document=document)


def pair_ids(
    processor: InputProcessor, ranker: Ranker, pair: tuple[str, str], instruction: str | None
) -> list[int]:
    """Return the tokens of a pair's prompt. RequestError if it exceeds the context."""
    if ranker.pooling.kind == "score":
        ids = processor.encode_pair(*pair)
    elif ranker.has_template:
        options = ChatOptions(add_generation_prompt=True)
        ids = processor.encode(processor.written(pair_messages(*pair, instruction), options), False)
    else:
        ids = processor.encode(pair_text(*pair, instruction), False)
    processor.check_length(ids)
    return ids


def check_instruction(ranker: Ranker, instruction: str | None) -> None:
    if ranker.pooling.kind == "score" and instruction is not None:
        raise RequestError("instruction: this model reads none. Omit it", "instruction")


def paired(
    ones: Sequence[str], twos: Sequence[str], names: tuple[str, str]
) -> list[tuple[str, str]]:
    """Return the pairs of two lists; one text of the first list is in all pairs."""
    if len(ones) not in (1, len(twos)):
        one, two = names
        raise RequestError(
            f"{one}: {len(ones)} texts for {len(twos)} of {two}. Send one, or as many", one
        )
    return [*zip(ones if len(ones) == len(twos) else [*ones] * len(twos), twos, strict=True)]


def score_of(outputs: Sequence[float], ranker: Ranker) -> float:
    """Return the score of a pair: a classifier's output, or the log-odds of the relevant token."""
    raw = outputs[0] if len(outputs) == 1 else outputs[1] - outputs[0]
    if not ranker.squashes:
        return raw
    # Without overflow for either sign.
    return 1 / (1 + math.exp(-raw)) if raw > 0 else math.exp(raw) / (1 + math.exp(raw))


def embedding_output(
    done: Generation, embedder: Embedder, dimensions: int | None
) -> EmbeddingRequestOutput:
    vector = vector_of(embedder, pooled_vector(done), dimensions)
    outputs = EmbeddingOutput(vector.tolist())
    return EmbeddingRequestOutput(str(done.id), outputs, [*done.prompt], done.num_cached)


def scoring_output(done: Generation, ranker: Ranker) -> ScoringRequestOutput:
    outputs = ScoringOutput(score_of(pooled_vector(done).tolist(), ranker))
    return ScoringRequestOutput(str(done.id), outputs, [*done.prompt], done.num_cached)
