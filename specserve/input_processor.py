"""From what a caller gives to what the engine takes: token ids and parameters, all checked."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from specserve.errors import PromptTooLong, RequestError
from specserve.exchange.sampling_params import Sampling, SamplingParams, resolve
from specserve.models.defaults import GenerationDefaults, load_defaults
from specserve.models.families import load_config
from specserve.models.tokenizer import check_same_vocabulary, load_tokenizer

Message = Mapping[str, Any]
PIECE = 16  # characters of text for every token of the context: four times what words have


class TextFiles(NamedTuple):
    """What a model's folder says of text; its weights, and their shape, are not among it."""

    tokenizer: Any
    defaults: GenerationDefaults


def load_text_files(folder: Path, draft: Path | None = None) -> TextFiles:
    """ConfigError where they are broken, or where a draft model's tokens are others."""
    tokenizer, defaults = load_tokenizer(folder), load_defaults(folder)
    if draft is not None:
        shapes = load_config(folder), load_config(draft)
        check_same_vocabulary(*shapes, tokenizer, load_tokenizer(draft))
    return TextFiles(tokenizer, defaults)


def make_input_processor(files: TextFiles, vocab_size: int, max_model_len: int) -> "InputProcessor":
    return InputProcessor(files.tokenizer, files.defaults, max_model_len, vocab_size)


class InputProcessor(msgspec.Struct, frozen=True):
    """What a model can read: its vocabulary, its context, and its defaults."""

    tokenizer: Any
    defaults: GenerationDefaults
    max_model_len: int
    vocab_size: int

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens; PromptTooLong, before it costs seconds, where they are far too many."""
        try:
            self.check_size(text)
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        except (TypeError, UnicodeError) as e:
            raise RequestError(f"the prompt is no valid text: {e}", "prompt") from e

    def check_size(self, text: str) -> None:
        """Count a long text piece by piece, until there are twice as many tokens as fit.

        Tokens may span two pieces, so the whole may have fewer, but never half as many.
        """
        size, num_tokens = PIECE * self.max_model_len, 0
        for start in range(0, len(text) if len(text) > size else 0, size):
            piece = self.tokenizer(text[start : start + size], add_special_tokens=False)
            num_tokens += len(piece["input_ids"])
            if num_tokens > 2 * self.max_model_len:
                raise PromptTooLong(num_tokens // 2, self.max_model_len - 1, is_at_least=True)

    def render(self, messages: Sequence[Message]) -> list[int]:
        """A conversation through the model's chat template, up to where the answer begins."""
        return self.encode(self.template(messages), add_special_tokens=False)

    def template(self, messages: Sequence[Message]) -> str:
        if not self.tokenizer.chat_template:
            raise RequestError(
                "the model has no chat template: complete plain text instead, or add "
                "chat_template.jinja to its folder"
            )
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except TimeoutError:  # it was stopped
            raise
        except Exception as e:  # a template is the model's own code, and raises what it likes
            raise RequestError(f"the chat template refuses these messages: {e!s:.200}") from e
        return text

    def read_ids(self, prompt: Any) -> list[int]:
        """Token ids of any integer type, as Python's own."""
        if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
            raise RequestError(
                f"a prompt is a string or a list of token ids, not {prompt!r:.50}", "prompt"
            )
        ids, vocab_size = list(prompt), self.vocab_size
        for token in ids:
            is_id = isinstance(token, Integral) and not isinstance(token, bool)
            if not is_id or not 0 <= token < vocab_size:
                raise RequestError(
                    f"prompt token {token!r:.50} is no id: ids lie in [0, {vocab_size})", "prompt"
                )
        return [int(token) for token in ids]

    def check_length(self, ids: Sequence[int]) -> None:
        """At least one token to read, and room for one to say."""
        limit = self.max_model_len - 1
        if not ids:
            raise RequestError("the prompt has no tokens: give at least one")
        if len(ids) > limit:
            raise PromptTooLong(len(ids), limit)

    def resolve(self, params: SamplingParams, num_prompt: int) -> Sampling:
        return resolve(params, self.defaults, self.max_model_len - num_prompt, self.vocab_size)
