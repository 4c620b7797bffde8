"""vLLM's interface of beam search."""

from typing import Annotated

import msgspec
from msgspec import Meta

from specserve.api.outputs import Logprob, RequestOutput
from specserve.errors import RequestError
from specserve.exchange.sampling_params import (
    MAX_CHOICES,
    EarlyStopping,
    SamplingParams,
    TakesVllmNames,
)
from specserve.text.grammars.structured_outputs import StructuredOutputsParams
from specserve.text.tokenizer import Tokenizer


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=TakesVllmNames):
    """Parameters of `LLM.beam_search`; SamplingParams describes those that are not here.

    beam_width    1 to 128 beams
    n             how many of them are returned, the best first; unset: all
    temperature   0: beam search draws nothing
    """

    beam_width: Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
    max_tokens: Annotated[int, Meta(ge=1)]
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    cache_salt: str = ""

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            use_beam_search=True,
            best_of=self.beam_width,
            n=self.beam_width if self.n is None else self.n,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
            structured_outputs=self.structured_outputs,
            cache_salt=self.cache_salt,
            logprobs=0,
        )


class BeamSearchSequence(msgspec.Struct, frozen=True):
    """A beam. Its tokens and text begin with the prompt's."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]  # of the output tokens
    cum_logprob: float  # their sum
    text: str
    finish_reason: str | None
    stop_reason: str | int | None


class BeamSearchOutput(msgspec.Struct, frozen=True):
    sequences: list[BeamSearchSequence]  # the best first


def checked(params: object) -> BeamSearchParams:
    """RequestError for another type, or for numbers of beams that are not possible."""
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params: a {type(params).__name__} is not a BeamSearchParams")
    width, n = params.beam_width, params.n
    if type(width) is not int or not 1 <= width <= MAX_CHOICES:
        message = f"beam_width: {width!r:.50} is not an integer from 1 to {MAX_CHOICES}"
        raise RequestError(message, "beam_width")
    if type(n) is int and n > width:
        message = f"n: {n} beams exceed beam_width = {width}. Reduce n, or omit it"
        raise RequestError(message, "n")
    return params


def beams_of(output: RequestOutput, tokenizer: Tokenizer) -> BeamSearchOutput:
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                [*output.prompt_token_ids, *choice.token_ids],
                choice.logprobs or [],
                choice.cumulative_logprob or 0.0,
                tokenizer.decode([*output.prompt_token_ids, *choice.token_ids]),
                choice.finish_reason,
                choice.stop_reason,
            )
            for choice in output.choices
        ]
    )
