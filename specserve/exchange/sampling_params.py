"""Sampling parameters, as a caller gives them and as resolved for one request."""

import difflib
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import Meta

from specserve.config import Milliseconds
from specserve.errors import RequestError
from specserve.text.defaults import (
    GenerationDefaults,
    MinP,
    RepetitionPenalty,
    Temperature,
    TopP,
    check_temperature,
)
from specserve.text.grammars.structured_outputs import StructuredOutputsParams, grammar_of

T = TypeVar("T")
MAX_CHOICES = 128
OTHER_NAMES = {  # of other servers' and libraries' parameters -> ours
    **dict.fromkeys(("max_length", "max_new_tokens", "n_predict", "num_predict"), "max_tokens"),
    "do_sample": "temperature",
    "flat_logprobs": "logprobs",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "stop_sequences": "stop",
}
MAX_SEED = 2**53  # exclusive, of seeds that are drawn: JavaScript clients hold them exactly
MAX_STOP_BYTES = 1 << 14  # of all stop strings of a request, in UTF-8
NO_OP: dict[str, tuple[Any, ...]] = {  # of vLLM's SamplingParams -> values without effect here
    "detokenize": (True,),
    "extra_args": (None, {}),
    "flat_logprobs": (False,),
    "guided_decoding": (None,),
    "logits_processors": (None, []),
}
INSTEAD = {
    "guided_decoding": "give structured_outputs=StructuredOutputsParams(...)",
    "logits_processors": "give them to LLM.generate(..., logits_processors=[...])",
}
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
ShortText = Annotated[str, Meta(min_length=1, max_length=256)]
Limit = Annotated[int, Meta(ge=0, lt=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogitBias = dict[Limit, Annotated[float, Meta(ge=-100, le=100)]]
NumTop = Annotated[int, Meta(ge=0, le=20)]


class SpeculationParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which guesses a request may have: they change how fast its text comes, never which text.

    enabled         false makes no guesses
    sources         the names of those that may guess; None is all that the engine has
    max_nodes       guesses a step; None is the server's speculation.max_nodes, which bounds it, too
    max_depth       guesses of a path; None is as many as max_nodes
    learn           false: other requests' guesses are not made from the output
    """

    enabled: bool = True
    learn: bool = True
    sources: Annotated[tuple[ShortText, ...], Meta(max_length=64)] | None = None
    max_nodes: Limit | None = None
    max_depth: Limit | None = None

    def allows(self, source: str) -> bool:
        return self.enabled and (self.sources is None or source in self.sources)

    def most_nodes(self, limit: int) -> int:
        """Guesses a step, where the server allows `limit`."""
        is_off = not self.enabled or self.sources == () or self.max_depth == 0
        return 0 if is_off else min(pick(self.max_nodes, limit), limit)

    def deepest(self, limit: int) -> int:
        """Guesses after one another, where the server allows `limit` a step."""
        most = self.most_nodes(limit)
        return min(pick(self.max_depth, most), most)


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's targets; None takes the server's, in [scheduler], which may be none."""

    ttft_ms: Milliseconds | None = None  # arrival to first token
    tpot_ms: Milliseconds | None = None  # mean time of a token after the first


class PredictedText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's form of an expected text."""

    content: str | list[PredictedText]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TakesVllmNames(msgspec.StructMeta):
    """Accepts vLLM's other parameters at the values that have no effect here.

    Other values raise RequestError, and names that vLLM lacks raise TypeError.
    """

    def __call__(cls, *args: Any, **given: Any) -> Any:
        own, owner = [*cls.__struct_fields__], cls.__name__
        for name in given.keys() - {*own}:
            value = given.pop(name)
            if name not in NO_OP:
                raise unexpected_argument(owner, name, own, OTHER_NAMES)
            if not is_one_of(value, NO_OP[name]):
                why = INSTEAD.get(name, "it is not supported")
                raise RequestError(f"{owner}({name}={value!r:.50}): {why}; leave {name} out", name)
        return super().__call__(*args, **given)


def unexpected_argument(
    owner: str, name: str, known: Sequence[str], other_names: Mapping[str, str] | None = None
) -> TypeError:
    """Python's error for an unknown argument, with the name that was probably meant."""
    near = [other_names[name]] if other_names and name in other_names else []
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f": did you mean {near[0]}?" if near else ""
    return TypeError(f"{owner}() got an unexpected keyword argument {name!r}{hint}")


def is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Whether a value is among the known ones, and has the same type: True is not 1."""
    return any(type(value) is type(one) and value == one for one in known)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=TakesVllmNames):
    """What a caller may set; None takes the value of the model's generation_config, if it has one.

    max_tokens      most output tokens, cut to the rest of the context; unset: the model's
                    max_new_tokens, else the rest of the context
    temperature     0 always takes the likeliest token; else 1e-4 to 1e4, 1 by default
    top_k           only the k likeliest tokens; 0, the default, and -1 are off
    top_p           only the likeliest tokens whose probabilities sum to this; 1 is off
    min_p           only tokens at least so likely relative to the likeliest; 0 is off
    presence_penalty    -2 to 2, taken off the logit of an id that the output has
    frequency_penalty   -2 to 2, taken off for each time that it has it
    repetition_penalty  1e-4 to 1e4; the logit of an id of prompt or output is divided by it, or
                        multiplied where it is below 0; 1 is off
    logit_bias      up to 1024 ids -> -100 to 100, added to their logits
    allowed_token_ids  1 to 4096 ids; no others are drawn
    bad_words       up to 256 strings of up to 256 characters and 64 tokens each: their tokens, as
                    written, without spaces before them and after one space, do not come one after
                    the other
    min_tokens      no end of text, stop id or stop string ends the text before so many tokens, up
                    to max_tokens and the rest of the context
    seed            -2^63 to 2^63 - 1; the same seed gives the same text; drawn, and reported, when
                    unset or -1
    stop            strings of up to 1024 characters and 16 KiB in all; the text ends before the
                    first
    stop_token_ids  ids that end the text; they add none to it
    include_stop_str_in_output  the text ends after the stop string, or with the stop id's own text
    skip_special_tokens  false: the text has special tokens, too, as they are written
    spaces_between_special_tokens  without effect: no tokenizer that is read here adds any
    truncate_prompt_tokens  only the prompt's last k tokens; -1: as many as fit beside max_tokens
    ignore_eos      go on after the model's own end of text; a text with structured_outputs ends
    structured_outputs  the form that the text has to have; not with min_tokens
    n               choices, 1 to 128, that share the prompt's KV; choice c has the seed
                    mix64(seed, c), and the text of a single request with that seed
    best_of         so many choices run, n to 128; those n are given whose tokens have the largest
                    mean logprob, the best first
    logprobs        tell each output token's logprob, and those of so many likeliest ones, up to 20;
                    true: its own alone
    prompt_logprobs  the same for the prompt's tokens; 0: their own alone
    priority        smaller ones are admitted first, and preempted last when memory is short
    cache_salt      prompts reuse cached KV of prompts with the same salt only; "" is the salt
                    of requests without one
    speculation     which sources may guess, and how much; None is all that the server allows
    slo             targets for the time to the first token and for each token after it
    return_speculation_details  tell every token's source, and every step's tree of guesses
    prediction      what most of the text is expected to be, as of a file that is to be edited: it
                    is guessed, and may be wrong; usage tells how much of it came
    """

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[LogitBias, Meta(max_length=1024)] | None = None
    allowed_token_ids: Annotated[tuple[int, ...], Meta(min_length=1, max_length=4096)] | None = None
    bad_words: Annotated[tuple[ShortText, ...], Meta(max_length=256)] | None = ()
    min_tokens: Limit = 0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | tuple[StopString, ...] | None = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=1024)] | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    ignore_eos: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: bool | NumTop | None = None
    prompt_logprobs: NumTop | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Meta(max_length=1024)] = ""
    speculation: SpeculationParams | None = None
    slo: Slo | None = None
    return_speculation_details: bool = False
    prediction: str | Prediction | None = None

    def clone(self, **changes: Any) -> Self:
        """A copy, with these parameters instead."""
        return type(self)(**({k: getattr(self, k) for k in self.__struct_fields__} | changes))

    @property
    def own_seed(self) -> int | None:
        """The caller's seed; None if one has to be drawn."""
        return None if self.seed == -1 else self.seed

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def num_choices(self) -> int:
        """How many run; `n` of them are given."""
        return pick(self.best_of, self.n)

    @property
    def is_ranked(self) -> bool:
        return self.num_choices > 1 and self.best_of is not None

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens that are told beside each output token; None: no logprobs are told."""
        if isinstance(self.logprobs, bool):
            return 0 if self.logprobs else None
        return self.logprobs


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved parameters, none of them unset; the engine takes no others.

    presence_penalty    taken off the logit of an id that the output has
    frequency_penalty   and this for each time that it has it
    repetition_penalty  an id of prompt or output has its logit divided by it, or multiplied where
                        it is below 0; 1 is off
    logit_bias          added to logits, by id
    allowed_ids         no others are drawn; None is all
    bad_words           token sequences that the output will not have; one that begins in the prompt
                        does not count
    min_tokens          stop_ids are not drawn before so many output tokens
    logprobs            tell each output token's logprob, and those of so many likeliest ones; None:
                        of none
    prompt_logprobs     the same for the prompt's tokens
    prediction          tokens that most of the output is expected to be
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()  # those of stop_ids that are the model's own
    priority: int = 0
    cache_salt: str = ""
    speculation: SpeculationParams = SpeculationParams()
    slo: Slo = Slo()
    return_speculation_details: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""
    prediction: tuple[int, ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether tokens change what comes after them."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0, 0, 1)

    @property
    def changes_logits(self) -> bool:
        has_others = self.logit_bias or self.allowed_ids is not None or self.bad_words
        return bool(has_others or self.min_tokens or self.grammar) or self.has_penalties


@lru_cache
def id_set(ids: tuple[int, ...]) -> frozenset[int]:
    """One set for all requests that have the same ids."""
    return frozenset(ids)


def mix64(seed: int, choice: int) -> int:
    """A choice's own seed: the request's for choice 0, else SplitMix64 (Steele, Lea and Flood 2014)
    of seed + choice golden gammas, in [0, 2^53).
    """
    if choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) % MAX_SEED


def choices_of(sampling: Sampling, n: int) -> list[Sampling]:
    """The parameters of n choices of a request, each with its seed."""
    seeds = [mix64(sampling.seed, c) for c in range(n)]
    return [msgspec.structs.replace(sampling, seed=seed) for seed in seeds]


def fields_of(params: msgspec.Struct) -> dict[str, Any]:
    """The parameters as nested dicts: msgspec does not validate an instance of the target type."""
    given = msgspec.structs.asdict(params)
    return {k: fields_of(v) if isinstance(v, msgspec.Struct) else v for k, v in given.items()}


def reason_and_path(error: Exception) -> tuple[str, str]:
    """What msgspec says is wrong, and where: a path like ".slo.tpot_ms"; "" is the whole value."""
    reason, _, path = str(error).partition("`$")
    is_key = reason.endswith(" - at `key` in ")
    reason = reason.removesuffix(" - at `key` in ").removesuffix(" - at ")
    return f"{reason} as a key" if is_key else reason, path.removesuffix("`").replace("[...]", "")


def check(params: SamplingParams) -> SamplingParams:
    """The parameters as msgspec converts them; RequestError if one is out of its range."""
    try:
        given = msgspec.convert(fields_of(params), SamplingParams, str_keys=True)
    except ValueError as e:  # msgspec's ValidationError is one
        reason, path = reason_and_path(e)
        param = path.lstrip(".") or None
        where = f"{param}: " if param else ""
        raise RequestError(f"sampling parameters: {where}{reason}", param) from e
    check_stop(given.stop_strings)
    try:
        if given.temperature:
            check_temperature(given.temperature)
    except ValueError as e:
        raise RequestError(f"sampling parameters: {e}", "temperature") from e
    if given.num_choices < given.n:
        raise RequestError(
            f"sampling parameters: best_of = {given.best_of} is less than n = {given.n}: leave it "
            "out, or send a larger one",
            "best_of",
        )
    try:
        given.cache_salt.encode()
    except UnicodeError as e:
        raise RequestError(f"sampling parameters: cache_salt is no text: {e}", "cache_salt") from e
    if given.max_tokens is not None and given.min_tokens > given.max_tokens:
        raise RequestError(
            f"sampling parameters: min_tokens = {given.min_tokens} is more than max_tokens = "
            f"{given.max_tokens}: send a smaller one",
            "min_tokens",
        )
    return given


def check_stop(strings: Sequence[str]) -> None:
    """RequestError for more bytes than may be searched for at each token."""
    num_bytes = sum(len(string.encode(errors="surrogatepass")) for string in strings)
    if num_bytes > MAX_STOP_BYTES:
        raise RequestError(
            f"sampling parameters: stop: {len(strings)} strings have {num_bytes} bytes, and "
            f"{MAX_STOP_BYTES} are allowed: send fewer or shorter ones",
            "stop",
        )


def resolve(params: SamplingParams, defaults: GenerationDefaults, room: int) -> Sampling:
    """Check the parameters and fill in what is unset; `room` is the rest of the context.

    The tokens of bad words are not filled in.
    """
    given, grammar = check(params), ""
    own_most = defaults.max_new_tokens
    if given.max_tokens is None and own_most is not None and given.min_tokens > own_most:
        raise RequestError(
            f"sampling parameters: min_tokens = {given.min_tokens} is more than {own_most}, the "
            "model's own max_tokens: send a smaller one, or max_tokens",
            "min_tokens",
        )
    check_room(given.min_tokens, room)
    if given.structured_outputs is not None:
        check_ends(given.min_tokens, defaults, "structured_outputs")
        grammar = grammar_of(given.structured_outputs)
    own = id_set(() if given.ignore_eos and not grammar else defaults.eos_token_ids)
    return Sampling(
        max_tokens=min(pick(given.max_tokens, pick(own_most, room)), room),
        temperature=pick(given.temperature, defaults.temperature),
        top_k=max(0, pick(given.top_k, defaults.top_k)),
        top_p=pick(given.top_p, defaults.top_p),
        min_p=pick(given.min_p, defaults.min_p),
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=pick(given.repetition_penalty, defaults.repetition_penalty),
        logit_bias=given.logit_bias or {},
        allowed_ids=given.allowed_token_ids,
        min_tokens=given.min_tokens,
        seed=drawn_seed() if given.own_seed is None else given.own_seed,
        stop=given.stop_strings,
        include_stop_str_in_output=given.include_stop_str_in_output,
        skip_special_tokens=given.skip_special_tokens,
        stop_ids=own | {*given.stop_token_ids} if given.stop_token_ids else own,
        eos_ids=own,
        priority=given.priority,
        cache_salt=given.cache_salt,
        speculation=pick(given.speculation, SpeculationParams()),
        slo=pick(given.slo, Slo()),
        return_speculation_details=given.return_speculation_details,
        logprobs=0 if given.is_ranked and given.num_top is None else given.num_top,
        prompt_logprobs=given.prompt_logprobs,
        grammar=grammar,
    )


def for_prompt(resolved: Sampling, seed: int | None, room: int) -> Sampling:
    """Resolved parameters for a prompt that leaves `room` tokens of the context.

    A seed of None is drawn. RequestError if the room is too small.
    """
    check_room(resolved.min_tokens, room)
    return msgspec.structs.replace(
        resolved,
        max_tokens=min(resolved.max_tokens, room),
        seed=drawn_seed() if seed is None else seed,
    )


def drawn_seed() -> int:
    return secrets.randbelow(MAX_SEED)


def check_room(min_tokens: int, room: int) -> None:
    if min_tokens > room:
        raise RequestError(
            f"sampling parameters: min_tokens = {min_tokens}, and the context has room for "
            f"{room} after the prompt: send a smaller one, or a shorter prompt",
            "min_tokens",
        )


def check_ends(min_tokens: int, defaults: GenerationDefaults, field: str) -> None:
    """RequestError if a text with the form that `field` asks for may not end when it is complete,
    or cannot.
    """
    if min_tokens:
        raise RequestError(
            f"min_tokens: not with {field}, as a text ends when it is complete: leave it out",
            "min_tokens",
        )
    if not defaults.eos_token_ids:
        raise RequestError(
            f"{field}: the model has no token that ends a text: none would be complete; leave it "
            "out, or add eos_token_id to the model's generation_config.json",
            field,
        )


def ruled(sampling: Sampling, grammar: str, ends: Sequence[int]) -> Sampling:
    """The same parameters for a text that obeys a grammar, and may end when it is complete."""
    return msgspec.structs.replace(
        sampling,
        grammar=grammar,
        stop_ids=sampling.stop_ids | {*ends},
        eos_ids=sampling.eos_ids | {*ends},
    )


def pick(given: T | None, default: T) -> T:
    return default if given is None else given
