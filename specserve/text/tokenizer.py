"""Tokenizers of checkpoint folders, streamed detokenization, and a comparison of vocabularies."""

import copy
import json
import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from specserve.errors import ConfigError, RequestError
from specserve.models.folder import check_tokenizer, read_json
from specserve.text.chat_template import (
    SPECIAL_TOKENS,
    ChatOptions,
    ChatTemplate,
    chat_template_of,
    find_chat_template,
    read_template,
)
from specserve.text.template_messages import Message

UNFINISHED = "\ufffd"  # decoders return it for bytes that form no complete character
BYTE = re.compile("<0x([0-9A-F]{2})>")
NamedToken = str | AddedToken  # both occur in checkpoint files


class Tokenizer:
    """A pipeline of the `tokenizers` library, with the model's chat template.

    It is thread-safe, and encoding releases the GIL.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        name: str = "",
        chat_template: ChatTemplate | None = None,
        response_template: Any = None,
        variables: dict[str, str] | None = None,
    ) -> None:
        """`variables` are special tokens by name, for a chat template that `templated` sets."""
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.name, self.chat_template = backend, name, chat_template
        self.response_template = response_template  # as in the file, unchecked
        self.variables = variables or {}
        self.kept_ids: frozenset[int] = frozenset()
        self.known_texts: dict[int, str] = {}
        self.known_bytes: dict[int, bytes] = {}

    def keeping(self, texts: Collection[str] | None) -> "Tokenizer":
        """A copy whose `decode` keeps the special tokens with these texts; None: all of them."""
        ids = self.special_ids if texts is None else {self.backend.token_to_id(t) for t in texts}
        kept = copy.copy(self)
        kept.__dict__.pop("skipped_ids", None)
        kept.kept_ids = self.special_ids & ids
        return kept if kept.kept_ids else self

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Invalid text raises TypeError or UnicodeError."""
        # The batch method releases the GIL and computes no offsets, which are unused.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text, with spaces unchanged. Unknown ids are left out."""
        if skip_special_tokens and self.kept_ids:
            token_ids = [token for token in token_ids if token not in self.skipped_ids]
            skip_special_tokens = False
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **chat_template_kwargs: Any,
    ) -> str | list[int]:
        """Render a conversation as transformers does, as ids or text. RequestError if invalid."""
        if self.chat_template is None:
            raise RequestError("the model has no chat template")
        flags = add_generation_prompt, continue_final_message, chat_template_kwargs
        options = ChatOptions(*flags, None if tools is None else [dict(tool) for tool in tools])
        text = self.chat_template.render(conversation, options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def templated(self, path: str | None) -> "Tokenizer":
        """A copy with the chat template of a file; None: this tokenizer."""
        if path is None:
            return self
        changed = copy.copy(self)
        source = read_template(Path(path).expanduser())
        changed.chat_template = ChatTemplate(source, self.variables)
        return changed

    @property
    def eos_token_id(self) -> int | None:
        text = self.variables.get("eos_token")
        return None if text is None else self.backend.token_to_id(text)

    def id_to_token(self, token: int) -> str | None:
        return self.backend.id_to_token(token)

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab()

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token appends to the text, also of special tokens. They may be a
        part of a character. Empty for an unknown id.
        """
        known = self.known_bytes.get(token)
        if known is None:
            known = self.known_bytes[token] = self.find_bytes(token)
        return known

    def find_bytes(self, token: int) -> bytes:
        written = self.backend.id_to_token(token)
        if written is None:
            return b""
        if "ByteLevel" in self.decoders:
            codes = [BYTE_OF.get(c) for c in written]
            return written.encode() if None in codes else bytes(c for c in codes if c is not None)
        if "ByteFallback" in self.decoders and (byte := BYTE.fullmatch(written)):
            return bytes.fromhex(byte[1])
        before = "a"  # any text: decoders strip a space at the start
        if self.backend.decoder is None:
            return f" {written}".encode()
        text: str = self.backend.decoder.decode([before, written])
        return text.removeprefix(before).encode()

    def whole_text(self, token: int) -> str:
        """The text that a token appends to complete characters, if it never depends on other
        tokens. Otherwise empty, for example for special tokens and parts of characters.
        """
        known = self.known_texts.get(token)
        if known is None:
            is_fixed = self.decoders == {"ByteLevel"} and token not in self.special_ids
            text = self.token_bytes(token).decode(errors="replace") if is_fixed else ""
            known = self.known_texts[token] = "" if UNFINISHED in text else text
        return known

    @cached_property
    def decoders(self) -> frozenset[str]:
        """The types of the decoder's steps."""
        decoder: Any = self.backend.decoder
        if decoder is None:
            return frozenset()
        written: Mapping[str, Any] = json.loads(decoder.__getstate__())
        return frozenset(part["type"] for part in written.get("decoders", [written]))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens. `decode` skips them unless they are kept."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    @cached_property
    def skipped_ids(self) -> frozenset[int]:
        return self.special_ids - self.kept_ids

    @cached_property
    def special_texts(self) -> frozenset[str]:
        return frozenset(filter(None, map(self.id_to_token, self.special_ids)))

    @cached_property
    def special_sizes(self) -> dict[str, set[int]]:
        """Lengths of special tokens, by first character."""
        sizes = dict[str, set[int]]()
        for text in self.special_texts:
            sizes.setdefault(text[0], set()).add(len(text))
        return sizes

    def has_special(self, text: str) -> bool:
        """Whether the text contains the text of a special token."""
        sizes, texts = self.special_sizes, self.special_texts
        starts = ((i, sizes[c]) for i, c in enumerate(text) if c in sizes)
        return any(text[i : i + size] in texts for i, of_c in starts for size in of_c)


def byte_alphabet() -> dict[str, int]:
    """The bytes of byte-level BPE's characters (GPT-2, Radford et al. 2019).

    Bytes that are printable in Latin-1 keep their character. The others map to U+0100 and the
    following characters, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable} | {b: 0x100 + i for i, b in enumerate(others)}
    return {chr(code): byte for byte, code in codes.items()}


BYTE_OF = byte_alphabet()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a folder's tokenizer and chat template. Code in the folder is never run."""
    check_tokenizer(folder)
    try:
        if (folder / "tokenizer.json").exists():
            return read_tokenizer(folder)
        return convert_tokenizer(folder)
    except ConfigError:
        raise
    except Exception as e:  # the libraries raise many types of errors, with several lines
        reason = " ".join(str(e).split())
        raise ConfigError(
            f"{folder}: the tokenizer cannot be loaded ({type(e).__name__}: {reason}). Download "
            "its files again. Tokenizers with custom code are not supported."
        ) from e


def read_tokenizer(folder: Path) -> Tokenizer:
    """Load tokenizer.json unchanged, and add the tokens of the other files.

    A few classes of transformers (LlamaTokenizer, Qwen2Tokenizer, GPT2Tokenizer, ...) read only
    vocabulary and merges from the file, and build the pipeline in code. If the pipelines differ,
    the model was trained with the pipeline in the file.
    """
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    known = backend.get_added_tokens_decoder()
    special = read_special_tokens(folder, config, known)
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    backend.add_tokens(special.to_add(known))
    template = find_chat_template(folder, config, special.variables)
    written = config.get("response_template")
    return Tokenizer(backend, str(folder), template, written, special.variables)


class SpecialTokens(NamedTuple):
    named: dict[str, NamedToken]  # "bos_token" -> "<s>"
    extra: list[NamedToken]  # without a name
    added: dict[int, AddedToken]  # special or not

    @property
    def variables(self) -> dict[str, str]:
        """The texts of named tokens, which chat templates read as variables."""
        return {name: text_of(token) for name, token in self.named.items()}

    def to_add(self, known: dict[int, AddedToken]) -> list[AddedToken]:
        """The tokens to add to a tokenizer with the `known` tokens, in the order of their ids."""
        found = [token for _, token in sorted(self.added.items())]
        texts = {token.content for token in (*known.values(), *found)}
        for token in (*self.named.values(), *self.extra):
            if text_of(token) not in texts:
                texts.add(text_of(token))
                found.append(AddedToken(token, special=True) if isinstance(token, str) else token)
        named = set(self.variables.values())
        for token in found:
            token.special = token.special or token.content in named
        return found


def read_special_tokens(
    folder: Path, config: Mapping[str, Any], known: dict[int, AddedToken]
) -> SpecialTokens:
    """Collect special tokens by the rules of transformers.

    tokenizer_config.json is complete if it has added_tokens_decoder. Otherwise the older files and
    the `known` tokens of tokenizer.json are added.
    """
    fields = read_tokens(config)
    written = fields.get("added_tokens_decoder")
    older = {} if written is not None else read_map(folder / "special_tokens_map.json")
    own = {name: token for name, token in named_in(fields).items() if name not in SPECIAL_TOKENS}
    named = named_in(fields) | named_in(older) | own
    extra = extra_in(fields) + [token for token in extra_in(older) if token not in extra_in(fields)]
    if written is not None:
        return SpecialTokens(named, extra, {int(id): token for id, token in written.items()})
    special, path = {text_of(t) for t in (*named.values(), *extra)}, folder / "added_tokens.json"
    added = {
        id: AddedToken(text, special=text in special, normalized=text not in special)
        for text, id in (read_json(path) if path.exists() else {}).items()
    }
    return SpecialTokens(named, extra, added | known)


def named_in(fields: Mapping[str, Any]) -> dict[str, NamedToken]:
    """Special tokens by name, also the names that a model defines."""
    tokens = {name: token for name, token in fields.items() if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(fields.get(key), Mapping):
            tokens |= fields[key]
    return {name: token for name, token in tokens.items() if isinstance(token, str | AddedToken)}


def extra_in(fields: Mapping[str, Any]) -> list[NamedToken]:
    """Special tokens without names."""
    tokens = fields.get("extra_special_tokens") or fields.get("additional_special_tokens")
    return list(tokens) if isinstance(tokens, list) else []


def read_map(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = read_tokens(read_json(path) if path.exists() else {})
    for token in (*fields.values(), *extra_in(fields)):
        if isinstance(token, AddedToken):
            token.special = True
    return fields


def read_tokens(value: Any) -> Any:
    """Replace each mapping that describes a token by an AddedToken."""
    if isinstance(value, list):
        return [read_tokens(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("content"), str):
        flags = "single_word", "lstrip", "rstrip", "normalized", "special"
        return AddedToken(value["content"], **{k: value[k] for k in flags if k in value})
    return {key: read_tokens(item) for key, item in value.items()}


def text_of(token: NamedToken) -> str:
    return token if isinstance(token, str) else token.content


def convert_tokenizer(folder: Path) -> Tokenizer:
    """Convert older files with transformers. The import takes seconds, so it happens only here."""
    from transformers import AutoTokenizer

    made: Any = AutoTokenizer.from_pretrained(
        folder, use_fast=True, trust_remote_code=False, local_files_only=True
    )
    if not made.is_fast:
        raise ConfigError(
            f"{folder}: {type(made).__name__} cannot be written as tokenizer.json. Use a model "
            "that includes this file."
        )
    variables = made.special_tokens_map
    template = chat_template_of(made.chat_template, variables)
    written = getattr(made, "response_template", None)
    return Tokenizer(made.backend_tokenizer, str(folder), template, written, variables)


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> int:
    """Return the number of ids. ConfigError unless both tokenizers have the same tokens and ids.

    Rows of the embedding tables beyond these ids are padding, and their number may differ.
    """
    ids, draft_ids = target.get_vocab(), draft.get_vocab()
    if draft_ids != ids:
        token, _ = min(ids.items() ^ draft_ids.items(), key=lambda item: (item[1], item[0]))
        raise ConfigError(
            f"draft model {draft.name}: its tokenizer differs from the target's, first at the "
            f"token {token!r} ({draft_ids.get(token)} there, {ids.get(token)} in the target). Use "
            "a draft model of the target model's family."
        )
    return 1 + max(ids.values(), default=-1)


CONTEXT = 6  # prompt tokens to decode first: a token's text may depend on tokens before it
MAX_UNREAD = 16  # maximum tokens of one character; then invalid bytes are shown


class StreamedText(NamedTuple):
    """The text of some tokens that can be sent, and the stop string that they completed."""

    text: str
    num_tokens: int  # number of tokens, up to the token that completed a stop string
    stop: str | None
    ends: list[int]  # length of `text` after each of these tokens, in characters
    starts: list[int]  # characters of the response before each of these tokens, including held text


class StopStrings(NamedTuple):
    """Stop strings, arranged so that the time per token hardly depends on their number."""

    known: frozenset[str]
    ordered: list[str]  # sorted
    lengths: list[int]  # distinct, ascending

    def find(self, text: str, searched: int) -> tuple[int, str] | None:
        """Find the earliest stop string that ends after the first `searched` characters. If several
        start at the same place, find the shortest. Return its start and its text.
        """
        found = [
            (start, part)
            for end in range(searched + 1, len(text) + 1)
            for length in self.lengths
            if (start := end - length) >= 0 and (part := text[start:end]) in self.known
        ]
        return min(found, default=None)

    def begin(self, text: str) -> int:
        """Return the start of the longest suffix that is the beginning of a stop string."""
        longest = self.lengths[-1] if self.lengths else 1
        for size in range(min(longest - 1, len(text)), 0, -1):
            place = bisect_left(self.ordered, text[-size:])
            if place < len(self.ordered) and self.ordered[place].startswith(text[-size:]):
                return len(text) - size
        return len(text)


@lru_cache(maxsize=16)
def stop_strings(stop: frozenset[str]) -> StopStrings:
    """Arrange stop strings once for all sequences of a request."""
    return StopStrings(stop, sorted(stop), sorted({*map(len, stop)}))


class TextStream:
    """Streams the text of one request, without parts of stop strings or of characters.

    Tokens are decoded one by one, because the text of bytes may depend on their grouping. The text
    must not depend on the number of accepted draft tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        keeps_stop: bool = False,
        skips_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Stop strings that end within the first `min_tokens` tokens are ignored."""
        self.tokenizer, self.min_tokens, self.skips_special = tokenizer, min_tokens, skips_special
        self.held = HeldText(stop, {s for s in stop if tokenizer.has_special(s)}, keeps_stop)
        # `context` has tokens whose text was taken; `unread` has the tokens after them.
        self.context, self.unread = list(prompt[-CONTEXT:]), list[int]()
        self.before = self.decode(self.context)
        if self.before.endswith(UNFINISHED):  # an incomplete character is no usable context
            self.context, self.before = [], ""
        self.num_tokens = 0
        self.num_taken = 0  # characters of all tokens so far without unread tokens

    def push(self, token_ids: Sequence[int]) -> StreamedText:
        """Add a step's tokens, in order, up to the token that completes a stop string."""
        shown, ends, starts = "", list[int](), list[int]()
        for n, token in enumerate(token_ids, 1):
            starts.append(self.num_taken)
            self.num_tokens += 1
            text = self.read(token)
            if not self.held.has_stop:
                shown += text
                ends.append(len(shown))
                continue
            self.hold(text, self.left_out(token))
            if (found := self.held.find_stop()) is not None:
                text = shown + self.held.until(found)
                return StreamedText(text, n, found[1], [*ends, len(text)], starts)
            shown += self.held.release()
            ends.append(len(shown))
        return StreamedText(shown, len(token_ids), None, ends, starts)

    def finish(self, end: int | None = None) -> tuple[str, str | None]:
        """Return the held text after the last token, and the stop string that ends it, if any.
        `end` is an end token. It adds no text, but it may complete a stop string.
        """
        self.hold(self.take(is_last=True))
        found = self.held.find_stop()
        if found is None and end is not None and end in self.tokenizer.special_ids:
            self.num_tokens += 1
            self.hold("", self.tokenizer.id_to_token(end) or "")
            found = self.held.find_stop()
        return self.held.until(found), found and found[1]

    def hold(self, text: str, hidden: str = "") -> None:
        """Hold visible and hidden text of the latest token."""
        self.held.add(text, hidden, is_early=self.num_tokens <= self.min_tokens)

    def left_out(self, token: int) -> str:
        """The text of a special token that the output leaves out, for stop strings; else empty."""
        if not self.skips_special or token not in self.tokenizer.skipped_ids:
            return ""
        return self.tokenizer.id_to_token(token) or ""

    def read(self, token: int) -> str:
        """The text of the unread tokens and this one; empty while a character is incomplete."""
        if not self.unread and (text := self.tokenizer.whole_text(token)):
            self.num_taken += len(text)
            self.context, self.before = [token], text
            return text
        self.unread.append(token)
        return self.take(is_last=len(self.unread) > MAX_UNREAD)

    def take(self, is_last: bool) -> str:
        """The text of the unread tokens; empty while a character is incomplete."""
        after = self.decode(self.context + self.unread)
        if len(after) <= len(self.before) or (after.endswith(UNFINISHED) and not is_last):
            return ""
        text = after[len(self.before) :]
        self.num_taken += len(text)
        self.context, self.unread = self.unread, []
        self.before = self.decode(self.context)
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, self.skips_special)


class HeldText:
    """Text that is held back because it may be the beginning of a stop string.

    Special tokens that the output leaves out are hidden parts of this text. They are only matched
    by stop strings that contain a special token.
    """

    def __init__(self, stop: Sequence[str], special: Set[str], keeps_stop: bool = False) -> None:
        self.has_stop, self.keeps_stop = bool(stop), keeps_stop
        self.plain = stop_strings(frozenset(stop) - special)
        self.special = stop_strings(frozenset(special))
        self.text = ""
        self.shown = list[int]()  # indices of visible characters in `text`
        self.searched = 0  # stop strings must end after the first `searched` characters

    def add(self, text: str, hidden: str, is_early: bool) -> None:
        """Add the text of one token. Stop strings that end in an early token are ignored."""
        before = len(self.text)
        self.shown += range(before, before + len(text))
        self.text += text + (hidden if self.special.known else "")
        self.searched = len(self.text) if is_early else before

    def find_stop(self) -> tuple[int, str] | None:
        """Find the earliest stop string that ends in the latest token's text. If several start at
        the same place, find the shortest. Return its start in the held text, and its text.
        """
        plain = self.plain.find(self.visible(), bisect_left(self.shown, self.searched))
        special = self.special.find(self.text, self.searched)
        each = [] if plain is None else [(self.shown[plain[0]], plain[1])]
        return min([*each, *([] if special is None else [special])], default=None)

    def visible(self) -> str:
        if len(self.shown) == len(self.text):
            return self.text
        return "".join(self.text[at] for at in self.shown)

    def until(self, found: tuple[int, str] | None) -> str:
        """The visible text up to a stop string; None: all visible text."""
        if found is None:
            return self.visible()
        place, stop = found
        before = self.visible()[: bisect_left(self.shown, place)]
        return before + stop if self.keeps_stop else before

    def release(self) -> str:
        """Remove and return the visible text before the longest possible start of a stop string."""
        places = [*self.shown, len(self.text)]
        cut = min(places[self.plain.begin(self.visible())], self.special.begin(self.text))
        num_shown = bisect_left(self.shown, cut)
        text = self.visible()[:num_shown]
        self.shown = [at - cut for at in self.shown[num_shown:]]
        self.text = self.text[cut:]
        return text
