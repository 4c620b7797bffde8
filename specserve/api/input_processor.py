"""Converts a caller's prompts and parameters to checked token ids and parameters."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from specserve.errors import PromptTooLong, RequestError
from specserve.exchange.sampling_params import (
    Prediction,
    ReasoningBudget,
    Sampling,
    SamplingParams,
    for_prompt,
    pick,
    resolve,
)
from specserve.models.end_tokens import EndTokens, find_end_tokens, report
from specserve.models.source import open_source
from specserve.text.answer.formats import (
    Formats,
    formats_of,
    reasoning_markers,
)
from specserve.text.chat_template import ChatOptions, ChatTemplate
from specserve.text.defaults import GenerationDefaults
from specserve.text.grammars.compiled import GrammarError, Verdicts, compile_grammar, vocabulary_of
from specserve.text.grammars.structured_outputs import FIELD
from specserve.text.newest_message import newest_begin
from specserve.text.template_messages import Message
from specserve.text.tokenizer import Tokenizer, check_same_vocabulary
from specserve_drafters.base import HEADS

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_WORD_TOKENS = 64  # of a bad word
log = logging.getLogger("specserve")
PIECE = 16  # characters per token of the context; English text has a quarter of this


def last(ids: list[int], kept: int | None) -> list[int]:
    return ids if kept is None else ids[-kept:]


def one_of(params: Any, sampling_params: Any) -> Any:
    """Return the parameters under either name. RequestError for both."""
    if params is not None and sampling_params is not None:
        raise RequestError("params and sampling_params have the same meaning. Pass one")
    return sampling_params if params is None else params


def unwrapped(prompt: Any) -> tuple[Any, str | None]:
    """Return a prompt and its text, if that is known.

    A prompt can be vLLM's {"prompt": text, "prompt_token_ids": ids}. The ids, if present, are used.
    """
    if isinstance(prompt, Mapping) and {"prompt", "prompt_token_ids"} >= {*prompt} != set():
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        return (text if ids is None else ids), text
    return prompt, prompt if isinstance(prompt, str) else None


class TextFiles(NamedTuple):
    """The parts of a model for text processing."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    ends: EndTokens = {}  # noqa: RUF012


def load_text_files(
    model: Path, draft: Path | None = None, chat_template: str | None = None
) -> TextFiles:
    """Load a model's text files. `chat_template` is a file that replaces the model's template.

    ConfigError if a file is broken, or if the draft model's vocabulary differs.
    """
    source = open_source(model)
    tokenizer = source.tokenizer().templated(chat_template)
    ends = find_end_tokens(source, tokenizer)
    defaults = msgspec.structs.replace(source.defaults(), eos_token_ids=tuple(ends))
    if draft is not None:
        check_same_vocabulary(tokenizer, open_source(draft).tokenizer())
    return TextFiles(tokenizer, defaults, ends)


def make_input_processor(
    files: TextFiles,
    vocab_size: int,
    max_model_len: int,
    sources: tuple[str, ...] = (),
    formats: Formats | None = None,
) -> "InputProcessor":
    """Return an InputProcessor, and log the end tokens. Ids beyond `vocab_size` are dropped."""
    ends = tuple(token for token in files.defaults.eos_token_ids if token < vocab_size)
    defaults = msgspec.structs.replace(files.defaults, eos_token_ids=ends)
    log.info(
        "%s", report({id: names for id, names in files.ends.items() if id in ends}, files.tokenizer)
    )
    return InputProcessor(files.tokenizer, defaults, max_model_len, vocab_size, sources, formats)


class InputProcessor(msgspec.Struct, frozen=True):
    """Tokenizes and checks input for a model's vocabulary, context length and defaults."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    max_model_len: int
    vocab_size: int
    sources: tuple[str, ...] = ()  # draft sources of the engine
    formats: Formats | None = None  # of responses; None: they are detected
    known_words: dict[
        tuple[str, ...], tuple[tuple[int, ...], ...]
    ] = {}  # the last bad words, and their tokens

    def read(
        self, prompt: Any, kept: int | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of a prompt of text or ids, or the last `kept` of them.

        RequestError if the prompt is invalid.
        """
        if isinstance(prompt, str):
            ids = self.encode(prompt, add_special_tokens, kept)
        else:
            ids = last(self.read_ids(prompt), kept)
        self.check_length(ids)
        return ids

    def encode(
        self, text: str, add_special_tokens: bool = True, kept: int | None = None
    ) -> list[int]:
        """Return a text's tokens, or the last `kept` of them.

        A text with far too many tokens is tokenized in part. It raises PromptTooLong or, with
        `kept`, only its end is tokenized.
        """
        try:
            if kept is None:
                self.check_size(text)
            else:
                text = self.end_of(text)
            ids = last(self.tokenizer.encode(text, add_special_tokens), kept)
        except (TypeError, UnicodeError) as e:
            raise RequestError(f"the prompt is not valid text: {e}", "prompt") from e
        self.check_ids(ids, "prompt")
        return ids

    def read_beginning(self, prompt: Any, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt of text or ids, without what exceeds the context.

        Special tokens at both ends of a text are kept.
        """
        most = self.max_model_len - 1
        if not isinstance(prompt, str):
            ids = self.read_ids(prompt)[:most]
        else:
            # Later characters cannot be among the first tokens unless the tokens are very long.
            text = prompt[: PIECE * self.max_model_len * 4]
            ids = self.tokenizer.encode(text, add_special_tokens)
            if len(ids) > most:
                own = self.tokenizer.encode(text, add_special_tokens=False)
                first = next(i for i in range(len(ids)) if ids[i : i + len(own)] == own)
                ending = ids[first + len(own) :]
                ids = [*ids[:first], *own[: most - first - len(ending)], *ending]
            self.check_ids(ids, "prompt")
        self.check_length(ids)
        return ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the tokens of two texts, with the tokenizer's special tokens for a pair."""
        try:
            for text in (first, second):
                self.check_size(text)
            ids = self.tokenizer.backend.encode(first, second).ids
        except (TypeError, UnicodeError) as e:
            raise RequestError(f"the pair is not valid text: {e}", "prompt") from e
        self.check_ids(ids, "prompt")
        return ids

    def check_size(self, text: str) -> None:
        """Count the tokens of a long text piece by piece, up to twice the context length.

        A token can span two pieces. The whole text may have fewer tokens, but at least half.
        """
        size, num_tokens = PIECE * self.max_model_len, 0
        for start in range(0, len(text) if len(text) > size else 0, size):
            piece = self.tokenizer.encode(text[start : start + size], add_special_tokens=False)
            num_tokens += len(piece)
            if num_tokens > 2 * self.max_model_len:
                raise PromptTooLong(num_tokens // 2, self.max_model_len, is_at_least=True)

    def end_of(self, text: str) -> str:
        """Return the text, or an end of it with at least as many tokens as the context."""
        size, num_tokens, start = PIECE * self.max_model_len, 0, len(text)
        if start <= size:
            return text
        while start > 0 and num_tokens <= 2 * self.max_model_len:
            start, end = max(0, start - size), start
            num_tokens += len(self.tokenizer.encode(text[start:end], add_special_tokens=False))
        return text[start:]

    def num_kept(self, params: SamplingParams) -> int | None:
        """Return how many of a prompt's last tokens are kept; None: all. Errors: as `resolve`."""
        asked, most = params.truncate_prompt_tokens, self.max_model_len - 1
        if asked == -1:
            own = min(pick(self.defaults.max_new_tokens, 1), most)
            asked = self.max_model_len - pick(params.max_tokens, own)
            if asked < 1:
                raise RequestError(
                    f"max_tokens = {params.max_tokens} leaves no room for a prompt with "
                    f"truncate_prompt_tokens = -1. Set at most {most}",
                    "max_tokens",
                )
        if asked is not None and not 1 <= asked <= most:
            raise RequestError(
                f"truncate_prompt_tokens = {asked}: use 1 to {most}, or -1 for as many as fit",
                "truncate_prompt_tokens",
            )
        return asked

    def read_ids(self, prompt: Any, field: str = "prompt") -> list[int]:
        """Return token ids of any integer type as ints. Errors name `field`."""
        if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
            raise RequestError(
                f"the prompt {prompt!r:.50} is neither a string nor a list of token ids", field
            )
        given = list(prompt)
        for token in given:
            if not isinstance(token, Integral) or isinstance(token, bool):
                raise RequestError(
                    f"{field}: {token!r:.50} is not a token id. Ids are integers in [0, "
                    f"{self.vocab_size})",
                    field,
                )
        ids = [int(token) for token in given]
        self.check_ids(ids, field)
        return ids

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """RequestError for ids outside the vocabulary, also for ids of a tokenizer or template.

        `Engine.add` checks again. An error here costs no step and names the token.
        """
        if not ids or (min(ids) >= 0 and max(ids) < self.vocab_size):
            return
        token = next(token for token in ids if not 0 <= token < self.vocab_size)
        text = self.tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        if text is None:
            raise RequestError(
                f"{field}: {token} is not a token id. Ids are integers in [0, {self.vocab_size})",
                field,
            )
        raise RequestError(
            f"{field}: the token {text!r:.50} has the id {token}, and the model has no embedding "
            f"for it (ids: [0, {self.vocab_size})). Omit the token",
            field,
        )

    def check_length(self, ids: Sequence[int]) -> None:
        """RequestError if there is no token, or no room for one output token."""
        if not ids:
            raise RequestError("the prompt has no tokens. Send at least one")
        if len(ids) >= self.max_model_len:
            raise PromptTooLong(len(ids), self.max_model_len)

    def check_chat(self) -> ChatTemplate:
        """Return the model's chat template. RequestError if it has none."""
        if self.tokenizer.chat_template is None:
            raise RequestError(
                "the model has no chat template. Use completions of plain text, start with "
                "--chat-template FILE, or add chat_template.jinja to the model's folder"
            )
        return self.tokenizer.chat_template

    def render(
        self,
        messages: Sequence[Message],
        options: ChatOptions | None = None,
        kept: int | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation, up to the start of the response, or the last `kept`
        of them.
        """
        return self.encode(self.written(messages, options), False, kept)

    def written(self, messages: Sequence[Message], options: ChatOptions | None = None) -> str:
        """Return the conversation as text, rendered by the chat template."""
        try:
            return self.check_chat().render(messages, options)
        except MemoryError as e:
            message = "the chat template needs too much memory for these messages. Send fewer"
            raise RequestError(message) from e

    def num_history(self, messages: Sequence[Message], text: str, ids: Sequence[int]) -> int:
        """Return the number of a conversation's tokens before its newest message, or a few less; 0
        if unknown. `text` and `ids` are the rendered conversation.
        """
        begin = newest_begin(messages, text)
        if begin == 0:
            return 0
        newest = self.encode(text[begin:], False, len(ids))
        return max(0, len(ids) - len(newest) - 1)  # a token may cross the border

    def default_params(self) -> SamplingParams:
        """Return the model's defaults of parameters."""
        names = {*GenerationDefaults.__struct_fields__} & {*SamplingParams.__struct_fields__}
        known = {name: getattr(self.defaults, name) for name in names}
        return SamplingParams(max_tokens=self.defaults.max_new_tokens, **known)

    def resolve(self, params: SamplingParams, num_prompt: int = 1) -> Sampling:
        """Check and resolve the parameters for a prompt of `num_prompt` tokens."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params: {params!r:.100} is not a SamplingParams")
        sampling = resolve(params, self.defaults, self.max_model_len - num_prompt)
        self.num_kept(params)
        self.check_ids(params.stop_token_ids or (), "stop_token_ids")
        self.check_ids([*sampling.logit_bias], "logit_bias")
        self.check_ids(sampling.allowed_ids or (), "allowed_token_ids")
        if params.bad_words:
            words = self.tokens_of_all(tuple(params.bad_words))
            sampling = msgspec.structs.replace(sampling, bad_words=words)
        if params.prediction is not None:
            ids = self.predicted(params.prediction)
            sampling = msgspec.structs.replace(sampling, prediction=ids)
        if params.thinking_token_budget is not None:
            budget = self.budget(params.thinking_token_budget)
            sampling = msgspec.structs.replace(sampling, reasoning=budget)
        check_any_left(sampling, self.vocab_size)
        self.check_sources(sampling.speculation.sources or ())
        return sampling

    def budget(self, max_tokens: int) -> ReasoningBudget:
        formats = formats_of(self.tokenizer) if self.formats is None else self.formats
        markers = reasoning_markers(formats, self.tokenizer)
        if markers is None:
            raise RequestError(
                "thinking_token_budget: the server cannot limit the reasoning of this model, whose "
                "markers are unknown or several tokens. Omit it",
                "thinking_token_budget",
            )
        return ReasoningBudget(max_tokens, *markers)

    def predicted(self, prediction: str | Prediction) -> tuple[int, ...]:
        """Return the tokens of a predicted text."""
        text = prediction if isinstance(prediction, str) else prediction.text
        try:
            ids = tuple(self.encode(text, add_special_tokens=False))
        except PromptTooLong:
            ids = None
        except RequestError as e:
            raise RequestError(f"prediction: {e}", "prediction") from e
        if ids is None or len(ids) > self.max_model_len:
            raise RequestError(
                f"prediction: the text has more than the {self.max_model_len} tokens of the "
                "context. Shorten it",
                "prediction",
            )
        return ids

    def for_prompts(
        self, resolved: Sampling, seed: int | None, lengths: Sequence[int]
    ) -> list[Sampling]:
        """Return the parameters for prompts of these lengths. A seed of None becomes random."""
        return [for_prompt(resolved, seed, self.max_model_len - length) for length in lengths]

    def tokens_of_all(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Cache the result of `tokens_of`, because the next prompt often has the same words."""
        tokens = self.known_words.get(words)
        if tokens is None:
            tokens = tuple(self.tokens_of(words))
            self.known_words.clear()
            self.known_words[words] = tokens
        return tokens

    def tokens_of(self, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Yield the token sequences to block for each bad word.

        They are the word as written and, as in vLLM, the word without leading spaces at the start
        of a text. If only its first token differs after a space, that form is blocked, too.
        """
        for place, word in enumerate(words):
            field = f"bad_words[{place}]"
            try:
                forms = self.forms_of(word)
            except (TypeError, UnicodeError) as e:
                raise RequestError(f"{field} is not valid text: {e}", field) from e
            for ids in forms:
                if not 0 < len(ids) <= MAX_WORD_TOKENS:
                    raise RequestError(
                        f"{field}: {word!r:.50} has {len(ids)} tokens. Use a bad word of 1 to "
                        f"{MAX_WORD_TOKENS} tokens",
                        field,
                    )
                self.check_ids(ids, field)
                yield ids

    def forms_of(self, word: str) -> Iterable[tuple[int, ...]]:
        bare = word.lstrip()
        spaced = f" {bare}"
        ids = {
            text: tuple(self.tokenizer.encode(text, add_special_tokens=False))
            for text in dict.fromkeys((bare, spaced, word) if bare else (word,))
        }
        forms = [ids[word]]
        if bare:
            is_other = len(ids[spaced]) == len(ids[bare]) and ids[spaced][0] != ids[bare][0]
            forms = [ids[bare], *([ids[spaced]] if is_other else []), ids[word]]
        return dict.fromkeys(forms)

    def check_sources(self, names: Sequence[str]) -> None:
        """RequestError for a source that the engine does not have."""
        for name in names:
            if name not in self.sources:
                known = ", ".join(self.sources) or "none, because speculation is off"
                hint = f": {HEADS[name]}" if name in HEADS else ""
                raise RequestError(
                    f"speculation.sources: unknown source {name!r:.50}{hint} (known: {known})",
                    "speculation.sources",
                )


class GrammarCheck:
    """Checks in this process whether grammars compile. Threads can share it."""

    def __init__(self, processor: InputProcessor) -> None:
        self.processor, self.verdicts, self.lock = processor, Verdicts(), Lock()
        self.vocabulary: LLTokenizer | None = None  # set by the first check

    def check(self, sampling: Sampling, field: str = FIELD) -> None:
        """RequestError for a grammar that cannot be compiled. This can take long."""
        if not sampling.grammar:
            return
        with self.lock:
            wrong = self.verdicts.find(sampling.grammar)
            if wrong is None:
                wrong = self.compile(sampling.grammar)
                self.verdicts.keep(sampling.grammar, wrong)
        if wrong:
            raise RequestError(f"{field}: {wrong}", field)

    def compile(self, grammar: str) -> str:
        """Return the grammar's error; empty if it compiles."""
        if self.vocabulary is None:
            own = self.processor
            ends = own.defaults.eos_token_ids
            self.vocabulary = vocabulary_of(own.tokenizer, own.vocab_size, ends)
        try:
            compile_grammar(self.vocabulary, grammar)
        except GrammarError as e:
            return str(e)
        return ""


def check_any_left(sampling: Sampling, vocab_size: int) -> None:
    """RequestError if a text exists after which no token is allowed. Kernels would return id 0."""
    early = sampling.stop_ids if sampling.min_tokens else frozenset[int]()
    ids = range(vocab_size) if sampling.allowed_ids is None else {*sampling.allowed_ids}
    if len(ids) > len(sampling.bad_words) + len(early):
        return
    left = {*ids}
    continuing = left - sampling.stop_ids
    lasts: dict[tuple[int, ...], set[int]] = {(): set()}  # last tokens of bad words, by the others
    for *begin, last in sampling.bad_words:
        lasts.setdefault(tuple(begin), set()).add(last)
    for text in filter(continuing.issuperset, lasts):
        bans = set[int]().union(*(lasts.get(text[k:], ()) for k in range(len(text) + 1)))
        if left <= (bans | early if len(text) < sampling.min_tokens else bans):
            param = "bad_words" if sampling.allowed_ids is None else "allowed_token_ids"
            sent = {"bad_words": sampling.bad_words, "min_tokens": sampling.min_tokens}
            names = " and ".join(name for name, value in sent.items() if value)
            raise RequestError(
                f"{param}: {names} could leave no token to sample. Allow more tokens, or block "
                "fewer",
                param,
            )
