"""Sampling parameters, as a caller sets them and as resolved for one request."""

import difflib
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import Meta

from specserve.config import Milliseconds
from specserve.errors import RequestError, in_json_words
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
    "max_thinking_tokens": "thinking_token_budget",
    "flat_logprobs": "logprobs",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "stop_sequences": "stop",
}
MAX_SEED = 2**53  # exclusive limit of drawn seeds; numbers in JavaScript represent them exactly
MAX_STOP_BYTES = 1 << 14  # of all stop strings of a request, in UTF-8
NO_OP: dict[str, tuple[Any, ...]] = {  # fields of vLLM's SamplingParams -> values without effect
    "detokenize": (True,),
    "extra_args": (None, {}),
    "flat_logprobs": (False,),
    "guided_decoding": (None,),
    "logits_processors": (None, []),
}
INSTEAD = {
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(...)",
    "logits_processors": "pass them to LLM.generate(..., logits_processors=[...])",
}
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
ShortText = Annotated[str, Meta(min_length=1, max_length=256)]
Limit = Annotated[int, Meta(ge=0, lt=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogitBias = dict[Limit, Annotated[float, Meta(ge=-100, le=100)]]
NumTop = Annotated[int, Meta(ge=0, le=20)]
EarlyStopping = bool | Literal["never"]


class SpeculationParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculation of a request. It changes how fast text comes, never which text.

    enabled         false turns speculation off
    sources         names of the draft sources to use; unset: all sources of the engine
    max_nodes       maximum draft tokens per step, up to the server's speculation.max_nodes; unset:
                    the server's
    max_depth       maximum draft tokens on one path of the tree; unset: max_nodes
    learn           false: the output is not used to draft for other requests
    """

    enabled: bool = True
    learn: bool = True
    sources: Annotated[tuple[ShortText, ...], Meta(max_length=64)] | None = None
    max_nodes: Limit | None = None
    max_depth: Limit | None = None

    def allows(self, source: str) -> bool:
        return self.enabled and (self.sources is None or source in self.sources)

    def most_nodes(self, limit: int) -> int:
        """Maximum draft tokens per step, if the server allows `limit`."""
        is_off = not self.enabled or self.sources == () or self.max_depth == 0
        return 0 if is_off else min(pick(self.max_nodes, limit), limit)

    def deepest(self, limit: int) -> int:
        """Maximum depth of the tree, if the server allows `limit` draft tokens per step."""
        most = self.most_nodes(limit)
        return min(pick(self.max_depth, most), most)


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's latency targets; unset: the server's targets in [scheduler], if it has any."""

    ttft_ms: Milliseconds | None = None  # arrival to first token
    tpot_ms: Milliseconds | None = None  # mean time per output token after the first


class PredictedText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's format of a predicted text."""

    content: str | list[PredictedText]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TakesVllmNames(msgspec.StructMeta):
    """Accepts vLLM's other parameters with values that have no effect in specserve.

    Other values raise RequestError. Unknown names raise TypeError.
    """

    def __call__(cls, *args: Any, **given: Any) -> Any:
        own, owner = [*cls.__struct_fields__], cls.__name__
        for name in given.keys() - {*own}:
            value = given.pop(name)
            if name not in NO_OP:
                raise unexpected_argument(owner, name, own, OTHER_NAMES)
            if not is_one_of(value, NO_OP[name]):
                why = INSTEAD.get(name, "it is not supported")
                raise RequestError(f"{owner}({name}={value!r:.50}): {why}. Omit {name}", name)
        return super().__call__(*args, **given)


def unexpected_argument(
    owner: str, name: str, known: Sequence[str], other_names: Mapping[str, str] | None = None
) -> TypeError:
    """Return Python's error for an unknown argument, with the most similar known name."""
    near = [other_names[name]] if other_names and name in other_names else []
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f": did you mean {near[0]}?" if near else ""
    return TypeError(f"{owner}() got an unexpected keyword argument {name!r}{hint}")


def is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Whether `known` has the value with the same type; True is not 1."""
    return any(type(value) is type(one) and value == one for one in known)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=TakesVllmNames):
    """A caller's parameters; unset: the value of the model's generation_config, if it has one.

    max_tokens      maximum output tokens, capped at the rest of the context; unset: the model's
                    max_new_tokens, else the rest of the context
    temperature     0 is greedy; else 1e-4 to 1e4, 1 by default
    top_k           sample from the k most likely tokens; 0, the default, and -1 are off
    top_p           sample from the most likely tokens whose probabilities sum to this; 1 is off
    min_p           minimum probability of a token, relative to the most likely token; 0 is off
    presence_penalty    -2 to 2, subtracted once from the logits of ids in the output
    frequency_penalty   -2 to 2, subtracted once per occurrence in the output
    repetition_penalty  1e-4 to 1e4; divides positive logits of ids in prompt and output, and
                        multiplies negative ones; 1 is off
    logit_bias      up to 1024 ids -> -100 to 100, added to their logits
    allowed_token_ids  1 to 4096 ids; no other ids are sampled
    bad_words       up to 256 strings of up to 256 characters and 64 tokens each; each is blocked as
                    written, without leading spaces, and after one space
    min_tokens      minimum output tokens before an end token, stop id or stop string ends the text;
                    at most max_tokens and the rest of the context
    seed            -2^63 to 2^63 - 1; the same seed returns the same text; unset or -1: a random
                    seed, which the output reports
    stop            strings of up to 1024 characters each and 16 KiB in total; the text ends before
                    the first one
    stop_token_ids  ids that end the text and are not part of it
    include_stop_str_in_output  true keeps the stop string, or the text of the stop id
    skip_special_tokens  false writes special tokens into the text
    spaces_between_special_tokens  without effect, because supported tokenizers add no spaces
    truncate_prompt_tokens  keep the last k tokens of the prompt; -1: as many as fit with max_tokens
    ignore_eos      continue after the model's end tokens; a text with structured_outputs still ends
    structured_outputs  a format that the text must have; not with min_tokens
    thinking_token_budget  maximum tokens of reasoning; after them the server ends it, if the model
                    reasons
    n               1 to 128 choices, which share the prompt's KV; choice c has the text of a single
                    request with the seed mix64(seed, c)
    best_of         run n to 128 choices, and return the n with the largest mean logprob of tokens,
                    the best first
    use_beam_search  run best_of beams without drafting, and return the n best; the texts are those
                    of transformers' generate(num_beams=best_of). temperature is 0, and no other
                    parameter may change the logits, except structured_outputs
    length_penalty  of beam search: beams are ranked by their sum of logprobs, divided by their
                    number of tokens to this power
    early_stopping  of beam search: true ends it with best_of ended beams; false, when the best
                    running beam is worse than the ended ones; "never", when none can become better
    logprobs        return the logprob of each output token and of up to 20 most likely tokens;
                    true: only of the output token
    prompt_logprobs  return the logprob of each prompt token and of up to 20 most likely tokens; 0:
                    only of the prompt token
    priority        smaller ones are admitted first, and preempted last if memory is short
    cache_salt      prompts reuse cached KV only of prompts with the same salt; "": no salt
    speculation     draft sources and limits of this request; unset: all that the server allows
    slo             targets for TTFT and TPOT
    return_speculation_details  return the source of every token and the tree of every step
    prediction      the expected text, e.g. a file to edit; its tokens are proposed as draft tokens,
                    and usage reports how many were part of the output
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
    thinking_token_budget: Limit | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    early_stopping: EarlyStopping = False
    logprobs: bool | NumTop | None = None
    prompt_logprobs: NumTop | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Meta(max_length=1024)] = ""
    speculation: SpeculationParams | None = None
    slo: Slo | None = None
    return_speculation_details: bool = False
    prediction: str | Prediction | None = None

    def clone(self, **changes: Any) -> Self:
        """Return a copy with changed parameters."""
        return type(self)(**({k: getattr(self, k) for k in self.__struct_fields__} | changes))

    @property
    def own_seed(self) -> int | None:
        """The caller's seed; None: a random seed is needed."""
        return None if self.seed == -1 else self.seed

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def num_choices(self) -> int:
        """The number of choices that run; `n` of them are returned."""
        return pick(self.best_of, self.n)

    @property
    def is_ranked(self) -> bool:
        return self.use_beam_search or (self.num_choices > 1 and self.best_of is not None)

    @property
    def num_top(self) -> int | None:
        """Number of most likely tokens with logprobs per output token; None: no logprobs."""
        if isinstance(self.logprobs, bool):
            return 0 if self.logprobs else None
        return self.logprobs


class BeamSearch(msgspec.Struct, frozen=True):
    """How the beams of a prompt are ranked and ended; see SamplingParams."""

    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


class ReasoningBudget(msgspec.Struct, frozen=True):
    """A limit of reasoning: after it, the closing is forced.

    max_tokens   maximum tokens of reasoning, without markers
    opening      tokens of the marker that begins reasoning, different from each other
    closing      forced tokens; the first one ends reasoning wherever it occurs
    """

    max_tokens: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]


class Pooling(msgspec.Struct, frozen=True):
    """The vector that the engine returns for a prompt, instead of tokens.

    kind  last: the hidden state of the last token; mean: the mean of all hidden states; score: the
          outputs of a sequence classifier; logits: the logits of `token_ids` after the last token
    """

    kind: Literal["last", "mean", "score", "logits"]
    token_ids: tuple[int, ...] = ()


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved parameters of one request. The engine only accepts these.

    presence_penalty    subtracted once from the logits of ids in the output
    frequency_penalty   subtracted once per occurrence in the output
    repetition_penalty  divides positive logits of ids in prompt and output, and multiplies negative
                        ones; 1 is off
    logit_bias          added to logits, by id
    allowed_ids         no other ids are sampled; None: all
    bad_words           token sequences that do not occur in the output; a sequence that begins in
                        the prompt is allowed
    min_tokens          stop_ids are not sampled before this many output tokens
    logprobs            number of most likely tokens with logprobs per output token, in addition to
                        its own logprob; None: no logprobs
    prompt_logprobs     the same for the prompt's tokens
    prediction          tokens of the predicted text
    beam_search         None: no beam search; else the choices of the prompt are its beams
    reasoning           limit of reasoning; None: no limit
    pooling             None: tokens are generated; else the prompt's vector is the only output
    num_history         tokens of a conversation before its newest message; 0: unknown
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
    eos_ids: frozenset[int] = frozenset()  # the model's end tokens among stop_ids
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
    beam_search: BeamSearch | None = None
    reasoning: ReasoningBudget | None = None
    pooling: Pooling | None = None
    num_history: int = 0

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on earlier tokens through penalties."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0, 0, 1)

    @property
    def changes_logits(self) -> bool:
        has_others = self.logit_bias or self.allowed_ids is not None or self.bad_words
        is_ruled = self.grammar or self.reasoning is not None
        return bool(has_others or self.min_tokens or is_ruled) or self.has_penalties


@lru_cache
def id_set(ids: tuple[int, ...]) -> frozenset[int]:
    """Return one set for all requests with the same ids."""
    return frozenset(ids)


def mix64(seed: int, choice: int) -> int:
    """Return the seed of a choice. Choice 0 uses the request's seed.

    The others use SplitMix64 (Steele, Lea and Flood 2014) of seed + choice golden gammas, in
    [0, 2^53).
    """
    if choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) % MAX_SEED


def choices_of(sampling: Sampling, n: int) -> list[Sampling]:
    """Return the parameters of each of the n choices, with its seed."""
    seeds = [mix64(sampling.seed, c) for c in range(n)]
    return [msgspec.structs.replace(sampling, seed=seed) for seed in seeds]


def fields_of(params: msgspec.Struct) -> dict[str, Any]:
    """Return the parameters as nested dicts, because msgspec only validates those."""
    given = msgspec.structs.asdict(params)
    return {k: fields_of(v) if isinstance(v, msgspec.Struct) else v for k, v in given.items()}


def reason_and_path(error: Exception) -> tuple[str, str]:
    """Return the reason of an error of msgspec, and a path like ".slo.tpot_ms"; "": the whole."""
    reason, _, path = str(error).partition("`$")
    is_key = reason.endswith(" - at `key` in ")
    reason = reason.removesuffix(" - at `key` in ").removesuffix(" - at ")
    reason = in_json_words(reason)
    return f"{reason} as a key" if is_key else reason, path.removesuffix("`").replace("[...]", "")


def check(params: SamplingParams) -> SamplingParams:
    """Return the validated parameters. RequestError if one is out of its range."""
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
            f"sampling parameters: best_of = {given.best_of} is less than n = {given.n}. Omit it, "
            "or increase it",
            "best_of",
        )
    if given.use_beam_search:
        check_beam_search(given)
    else:
        check_no_beam_search(given)
    try:
        given.cache_salt.encode()
    except UnicodeError as e:
        message = f"sampling parameters: cache_salt is not valid Unicode: {e}"
        raise RequestError(message, "cache_salt") from e
    if given.max_tokens is not None and given.min_tokens > given.max_tokens:
        raise RequestError(
            f"sampling parameters: min_tokens = {given.min_tokens} is more than max_tokens = "
            f"{given.max_tokens}. Reduce min_tokens",
            "min_tokens",
        )
    return given


# Parameters that beam search does not support, with their values without effect.
NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0),
    "top_k": (None, 0, -1),
    "top_p": (None, 1),
    "min_p": (None, 0),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, ()),
    "min_tokens": (0,),
    "stop": (None, ()),
    "prompt_logprobs": (None,),
    "prediction": (None,),
    "return_speculation_details": (False,),
    "thinking_token_budget": (None,),
}


def check_beam_search(given: SamplingParams) -> None:
    """RequestError for a parameter that beam search does not support."""
    for name, values in NOT_WITH_BEAMS.items():
        if getattr(given, name) not in values:
            raise RequestError(
                f"sampling parameters: {name}: not supported with use_beam_search. Omit one of "
                "them",
                name,
            )


def check_no_beam_search(given: SamplingParams) -> None:
    """RequestError for a parameter that only beam search has."""
    for name, usual in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(given, name) != usual:
            raise RequestError(
                f"sampling parameters: {name}: only for beam search. Set use_beam_search = true, "
                "or omit it",
                name,
            )


def check_stop(strings: Sequence[str]) -> None:
    """RequestError if the stop strings have too many bytes to search for after each token."""
    num_bytes = sum(len(string.encode(errors="surrogatepass")) for string in strings)
    if num_bytes > MAX_STOP_BYTES:
        raise RequestError(
            f"sampling parameters: stop: {len(strings)} strings have {num_bytes} bytes. At most "
            f"{MAX_STOP_BYTES} are allowed",
            "stop",
        )


def resolve(params: SamplingParams, defaults: GenerationDefaults, room: int) -> Sampling:
    """Check the parameters and resolve unset ones. `room` is the rest of the context.

    Does not tokenize bad words.
    """
    given, grammar = check(params), ""
    own_most = defaults.max_new_tokens
    if given.max_tokens is None and own_most is not None and given.min_tokens > own_most:
        raise RequestError(
            f"sampling parameters: min_tokens = {given.min_tokens} is more than {own_most}, the "
            "model's default of max_tokens. Reduce it, or set max_tokens",
            "min_tokens",
        )
    check_room(given.min_tokens, room)
    if given.structured_outputs is not None:
        check_ends(given.min_tokens, defaults, "structured_outputs")
        grammar = grammar_of(given.structured_outputs)
    search, speculation = None, pick(given.speculation, SpeculationParams())
    if given.use_beam_search:
        search = BeamSearch(given.length_penalty, given.early_stopping)
        speculation = SpeculationParams(enabled=False)
        defaults = msgspec.structs.replace(
            defaults, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0
        )
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
        speculation=speculation,
        slo=pick(given.slo, Slo()),
        return_speculation_details=given.return_speculation_details,
        logprobs=0 if given.is_ranked and given.num_top is None else given.num_top,
        prompt_logprobs=given.prompt_logprobs,
        grammar=grammar,
        beam_search=search,
    )


def pooled(pooling: Pooling, priority: int = 0, cache_salt: str = "") -> Sampling:
    """Return the parameters of a prompt that is pooled."""
    return Sampling(
        max_tokens=1,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        priority=priority,
        cache_salt=cache_salt,
        speculation=SpeculationParams(enabled=False),
        pooling=pooling,
    )


def for_prompt(resolved: Sampling, seed: int | None, room: int) -> Sampling:
    """Return resolved parameters for a prompt that leaves `room` tokens of the context.

    A seed of None becomes a random seed. RequestError if min_tokens does not fit.
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
            f"sampling parameters: min_tokens = {min_tokens} is more than the {room} tokens that "
            "the context has left after the prompt. Reduce it, or shorten the prompt",
            "min_tokens",
        )


def check_ends(min_tokens: int, defaults: GenerationDefaults, field: str) -> None:
    """RequestError if a text with the format of `field` could not end as soon as it is complete."""
    if min_tokens:
        raise RequestError(
            f"min_tokens: not supported with {field}, because a complete text ends. vLLM forbids "
            "end tokens until then, so that no token may be left. Omit it",
            "min_tokens",
        )
    if not defaults.eos_token_ids:
        raise RequestError(
            f"{field}: the model has no end token, so a text would not end. Omit it, or add "
            "eos_token_id to the model's generation_config.json",
            field,
        )


def ruled(sampling: Sampling, grammar: str, ends: Sequence[int]) -> Sampling:
    """Return the parameters with a grammar, and with end tokens for a complete text."""
    return msgspec.structs.replace(
        sampling,
        grammar=grammar,
        stop_ids=sampling.stop_ids | {*ends},
        eos_ids=sampling.eos_ids | {*ends},
    )


def pick(given: T | None, default: T) -> T:
    return default if given is None else given
