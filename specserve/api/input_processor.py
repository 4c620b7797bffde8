"""Turns a caller's prompts and parameters into checked token ids and parameters."""

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
    Sampling,
    SamplingParams,
    for_prompt,
    pick,
    resolve,
)
from specserve.models.end_tokens import EndTokens, find_end_tokens, report
from specserve.models.source import open_source
from specserve.text.chat_template import ChatOptions, ChatTemplate
from specserve.text.defaults import GenerationDefaults
from specserve.text.grammars.compiled import GrammarError, Verdicts, compile_grammar, vocabulary_of
from specserve.text.grammars.structured_outputs import FIELD
from specserve.text.template_messages import Message
from specserve.text.tokenizer import Tokenizer, check_same_vocabulary
from specserve_drafters.base import HEADS

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_WORD_TOKENS = 64
log = logging.getLogger("specserve")
PIECE = 16  # characters per token of the context: four times what English text has


def last(ids: list[int], kept: int | None) -> list[int]:
    return ids if kept is None else ids[-kept:]


def one_of(params: Any, sampling_params: Any) -> Any:
    """The parameters, by either name; RequestError for both."""
    if params is not None and sampling_params is not None:
        raise RequestError("params and sampling_params: they are the same; give one")
    return sampling_params if params is None else params


def unwrapped(prompt: Any) -> tuple[Any, str | None]:
    """A prompt and its text, if it comes with that; of vLLM's {"prompt": text, "prompt_token_ids":
    ids} the ids are the prompt, where there are any.
    """
    if isinstance(prompt, Mapping) and {"prompt", "prompt_token_ids"} >= {*prompt} != set():
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        return (text if ids is None else ids), text
    return prompt, prompt if isinstance(prompt, str) else None


class TextFiles(NamedTuple):
    """The parts of a model that text processing needs."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    ends: EndTokens = {}  # noqa: RUF012


def load_text_files(
    model: Path, draft: Path | None = None, chat_template: str | None = None
) -> TextFiles:
    """Load a model's text files; ConfigError if broken, or if the draft's vocabulary differs.
    `chat_template` is a file with a template that the model gets instead of its own.
    """
    source = open_source(model)
    tokenizer = source.tokenizer().templated(chat_template)
    ends = find_end_tokens(source, tokenizer)
    defaults = msgspec.structs.replace(source.defaults(), eos_token_ids=tuple(ends))
    if draft is not None:
        check_same_vocabulary(tokenizer, open_source(draft).tokenizer())
    return TextFiles(tokenizer, defaults, ends)


def make_input_processor(
    files: TextFiles, vocab_size: int, max_model_len: int, sources: tuple[str, ...] = ()
) -> "InputProcessor":
    """Logs the end tokens, without the ids beyond `vocab_size`, which the model cannot emit."""
    ends = tuple(token for token in files.defaults.eos_token_ids if token < vocab_size)
    defaults = msgspec.structs.replace(files.defaults, eos_token_ids=ends)
    log.info(
        "%s", report({id: names for id, names in files.ends.items() if id in ends}, files.tokenizer)
    )
    return InputProcessor(files.tokenizer, defaults, max_model_len, vocab_size, sources)


class InputProcessor(msgspec.Struct, frozen=True):
    """Tokenizes and checks input by a model's vocabulary, context length and defaults."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    max_model_len: int
    vocab_size: int
    sources: tuple[str, ...] = ()  # of guesses, that the engine has
    known_words: dict[
        tuple[str, ...], tuple[tuple[int, ...], ...]
    ] = {}  # the last bad words, and their tokens

    def read(
        self, prompt: Any, kept: int | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids of a prompt, given as text or ids, or the last `kept` of them;
        RequestError if it cannot be served.
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
        """A text's tokens, or the last `kept` of them. If there are far too many, the text is not
        tokenized as a whole: all tokens are PromptTooLong, and the last are those of its end.
        """
        try:
            if kept is None:
                self.check_size(text)
            else:
                text = self.end_of(text)
            ids = last(self.tokenizer.encode(text, add_special_tokens), kept)
        except (TypeError, UnicodeError) as e:
            raise RequestError(f"the prompt is no valid text: {e}", "prompt") from e
        self.check_ids(ids, "prompt")
        return ids

    def check_size(self, text: str) -> None:
        """Count a long text piece by piece, until there are twice as many tokens as fit.

        Tokens may span two pieces, so the whole may have fewer, but never half as many.
        """
        size, num_tokens = PIECE * self.max_model_len, 0
        for start in range(0, len(text) if len(text) > size else 0, size):
            piece = self.tokenizer.encode(text[start : start + size], add_special_tokens=False)
            num_tokens += len(piece)
            if num_tokens > 2 * self.max_model_len:
                raise PromptTooLong(num_tokens // 2, self.max_model_len, is_at_least=True)

    def end_of(self, text: str) -> str:
        """All of the text, or an end of it that has at least as many tokens as fit, as above."""
        size, num_tokens, start = PIECE * self.max_model_len, 0, len(text)
        if start <= size:
            return text
        while start > 0 and num_tokens <= 2 * self.max_model_len:
            start, end = max(0, start - size), start
            num_tokens += len(self.tokenizer.encode(text[start:end], add_special_tokens=False))
        return text[start:]

    def num_kept(self, params: SamplingParams) -> int | None:
        """How many of a prompt's last tokens are kept; None is all. Errors: as of `resolve`."""
        asked, most = params.truncate_prompt_tokens, self.max_model_len - 1
        if asked == -1:
            own = min(pick(self.defaults.max_new_tokens, 1), most)
            asked = self.max_model_len - pick(params.max_tokens, own)
            if asked < 1:
                raise RequestError(
                    f"max_tokens = {params.max_tokens}: truncate_prompt_tokens = -1 leaves room "
                    f"for so many, which may be {most - 1} then, so that a prompt fits too",
                    "max_tokens",
                )
        if asked is not None and not 1 <= asked <= most:
            raise RequestError(
                f"truncate_prompt_tokens = {asked}: it is 1 to {most}, or -1 for what fits",
                "truncate_prompt_tokens",
            )
        return asked

    def read_ids(self, prompt: Any, field: str = "prompt") -> list[int]:
        """Token ids of any integer type, as Python's own; errors name `field`."""
        if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
            raise RequestError(
                f"a prompt is a string or a list of token ids, not {prompt!r:.50}", field
            )
        given = list(prompt)
        for token in given:
            if not isinstance(token, Integral) or isinstance(token, bool):
                raise RequestError(
                    f"{field}: token {token!r:.50} is no id: ids lie in [0, {self.vocab_size})",
                    field,
                )
        ids = [int(token) for token in given]
        self.check_ids(ids, field)
        return ids

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """RequestError for ids outside the vocabulary, whether given, tokenized or templated.

        Checked here, a refusal costs no step and names the token; `Engine.add` checks again.
        """
        if not ids or (min(ids) >= 0 and max(ids) < self.vocab_size):
            return
        token = next(token for token in ids if not 0 <= token < self.vocab_size)
        text = self.tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        if text is None:
            raise RequestError(
                f"{field}: {token} is no token id: ids lie in [0, {self.vocab_size})", field
            )
        raise RequestError(
            f"{field}: the token {text!r:.50} has the id {token}, and the model's ids lie in "
            f"[0, {self.vocab_size}): leave it out, or serve a model that has an embedding of it",
            field,
        )

    def check_length(self, ids: Sequence[int]) -> None:
        """RequestError unless there is a token, and room for one output token."""
        if not ids:
            raise RequestError("the prompt has no tokens: give at least one")
        if len(ids) >= self.max_model_len:
            raise PromptTooLong(len(ids), self.max_model_len)

    def check_chat(self) -> ChatTemplate:
        """The model's chat template; RequestError where it has none."""
        if self.tokenizer.chat_template is None:
            raise RequestError(
                "the model has no chat template: complete plain text instead, start with "
                "--chat-template FILE, or add chat_template.jinja to its folder"
            )
        return self.tokenizer.chat_template

    def render(
        self,
        messages: Sequence[Message],
        options: ChatOptions | None = None,
        kept: int | None = None,
    ) -> list[int]:
        """The tokens of a conversation by the chat template, up to where the answer begins, or the
        last `kept` of them.
        """
        return self.encode(self.written(messages, options), False, kept)

    def written(self, messages: Sequence[Message], options: ChatOptions | None = None) -> str:
        """The conversation as text, by the chat template."""
        try:
            return self.check_chat().render(messages, options)
        except MemoryError as e:
            raise RequestError("the chat template needs too much memory for these messages") from e

    def default_params(self) -> SamplingParams:
        """The model's own values of parameters."""
        names = {*GenerationDefaults.__struct_fields__} & {*SamplingParams.__struct_fields__}
        known = {name: getattr(self.defaults, name) for name in names}
        return SamplingParams(max_tokens=self.defaults.max_new_tokens, **known)

    def resolve(self, params: SamplingParams, num_prompt: int = 1) -> Sampling:
        """The parameters, checked and resolved, for a prompt of `num_prompt` tokens."""
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
        check_any_left(sampling, self.vocab_size)
        self.check_sources(sampling.speculation.sources or ())
        return sampling

    def predicted(self, prediction: str | Prediction) -> tuple[int, ...]:
        """The tokens of a text that is expected."""
        text = prediction if isinstance(prediction, str) else prediction.text
        try:
            ids = tuple(self.encode(text, add_special_tokens=False))
        except PromptTooLong:
            ids = None
        except RequestError as e:
            raise RequestError(f"prediction: {e}", "prediction") from e
        if ids is None or len(ids) > self.max_model_len:
            raise RequestError(
                f"prediction: it has more than the {self.max_model_len} tokens of the context: "
                "send less of it",
                "prediction",
            )
        return ids

    def for_prompts(
        self, resolved: Sampling, seed: int | None, lengths: Sequence[int]
    ) -> list[Sampling]:
        """Resolved parameters for prompts of so many tokens each; a seed of None is drawn."""
        return [for_prompt(resolved, seed, self.max_model_len - length) for length in lengths]

    def tokens_of_all(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """As `tokens_of`; kept for the next prompt, which often comes with the same words."""
        tokens = self.known_words.get(words)
        if tokens is None:
            tokens = tuple(self.tokens_of(words))
            self.known_words.clear()
            self.known_words[words] = tokens
        return tokens

    def tokens_of(self, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """The tokens of each bad word as it is written and, by vLLM's rule, of the word without
        spaces before it: as a text begins with it and, if only the first token is another one, as
        it follows a space.
        """
        for place, word in enumerate(words):
            field = f"bad_words[{place}]"
            try:
                forms = self.forms_of(word)
            except (TypeError, UnicodeError) as e:
                raise RequestError(f"{field} is no valid text: {e}", field) from e
            for ids in forms:
                if not 0 < len(ids) <= MAX_WORD_TOKENS:
                    raise RequestError(
                        f"{field}: {word!r:.50} has {len(ids)} tokens, and a bad word has 1 to "
                        f"{MAX_WORD_TOKENS}: leave it out, or send a part of it",
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
        """RequestError for a source that the engine lacks: its guesses would be waited for."""
        for name in names:
            if name not in self.sources:
                known = ", ".join(self.sources) or "none, as this engine does not speculate"
                known = (
                    f"{HEADS[name]}; there are {known}" if name in HEADS else f"there are {known}"
                )
                raise RequestError(
                    f"speculation.sources: {name!r:.50} is no source of guesses here: {known}",
                    "speculation.sources",
                )


class GrammarCheck:
    """Compiles grammars in this process, to see whether they can be. Any number of threads may use
    it at once.
    """

    def __init__(self, processor: InputProcessor) -> None:
        self.processor, self.verdicts, self.lock = processor, Verdicts(), Lock()
        self.vocabulary: LLTokenizer | None = None  # read when it is first needed

    def check(self, sampling: Sampling, field: str = FIELD) -> None:
        """RequestError for a grammar that cannot be compiled; some take long to find that out."""
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
        """What is wrong with it."""
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
    """RequestError if after some text no token could be drawn: kernels would take id 0 then."""
    early = sampling.stop_ids if sampling.min_tokens else frozenset[int]()
    ids = range(vocab_size) if sampling.allowed_ids is None else {*sampling.allowed_ids}
    if len(ids) > len(sampling.bad_words) + len(early):
        return
    left = {*ids}
    said = left - sampling.stop_ids  # and the text goes on
    lasts: dict[tuple[int, ...], set[int]] = {(): set()}  # of bad words, by what comes before
    for *begin, last in sampling.bad_words:
        lasts.setdefault(tuple(begin), set()).add(last)
    for text in filter(said.issuperset, lasts):
        bans = set[int]().union(*(lasts.get(text[k:], ()) for k in range(len(text) + 1)))
        if left <= (bans | early if len(text) < sampling.min_tokens else bans):
            param = "bad_words" if sampling.allowed_ids is None else "allowed_token_ids"
            sent = {"bad_words": sampling.bad_words, "min_tokens": sampling.min_tokens}
            names = " and ".join(name for name, value in sent.items() if value)
            raise RequestError(
                f"{param}: {names} could leave no token to draw: allow more tokens, or rule out "
                "fewer",
                param,
            )
