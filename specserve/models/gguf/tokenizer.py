"""Builds a tokenizer from a GGUF file's metadata: byte-level BPE, or SentencePiece BPE."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specserve.models.gguf.architectures import ARCHITECTURES
from specserve.models.gguf.header import Array, Value
from specserve.models.gguf.pre_tokenizers import PreTokenizer, find_pre_tokenizer

PREFIX = "tokenizer.ggml."
# Byte-level BPE; SentencePiece BPE with scores or merges; the same with merges, without a space
# before texts.
GEMMA4 = "gemma4"
MODELS = "gpt2", "llama", GEMMA4
NAMED = {  # name in chat templates -> key in the file
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # GGUF's spelling
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
SENTENCEPIECE_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # defaults
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
NEEDED = ("bos_token_id", *ENDS)  # keys that must have valid ids
KNOWN = "known text"  # the source of end tokens in END_TEXTS
# Control or added tokens that always end a text, as in llama.cpp.
END_TEXTS = (
    "</s>",
    "<EOT>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|END_OF_TURN_TOKEN|>",
    "<|call|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<|end|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|return|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[EOS]",
    "[EOT]",
)
GEMMA_ENDS = "<eos>", "<turn|>", "<|tool_response>"  # of Gemma 4
HARMONY = {"<|return|>", "<|call|>"}  # end tokens of gpt-oss, whose <|end|> ends only a message


class TokenKind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def find_model(metadata: dict[str, Value | Array]) -> str:
    """The tokenizer's type. Raises ValueError if it is not supported."""
    model = metadata.get(f"{PREFIX}model")
    if model not in MODELS:
        raise ValueError(f"{PREFIX}model = {model!r} is not supported, only {', '.join(MODELS)}")
    return str(model)


def spelled(token: str) -> str:
    """Files of Gemma spell tokens of several spaces as such, and its merges have ▁ for spaces."""
    return token.replace(" ", "▁") if token.isspace() else token


class GgufVocabulary:
    """The metadata of a tokenizer. Raises ValueError if fields are missing or inconsistent."""

    def __init__(self, metadata: dict[str, Value | Array]) -> None:
        self.metadata = metadata
        self.model = find_model(metadata)
        named = ARCHITECTURES.get(str(metadata.get("general.architecture")))
        self.merges_by_id = named is not None and named.merges_by_id
        self.tokens = self.array("tokens").strings()
        if self.merges_by_id and self.model == "llama":
            self.tokens = [spelled(token) for token in self.tokens]
        self.kinds = self.numbers("token_type") or [TokenKind.NORMAL] * len(self.tokens)
        if self.model == GEMMA4:  # these tokens are special, whatever the file says
            special = [id for id, token in enumerate(self.tokens) if token in GEMMA_ENDS]
            self.kinds = [*self.kinds]
            for id in special:
                self.kinds[id] = TokenKind.CONTROL
        kept = [(token, id) for id, token in enumerate(self.tokens) if not self.is_filler(id)]
        self.ids = dict(kept)
        if len(self.ids) < len(kept):
            raise ValueError(f"{PREFIX}tokens has a token twice")

    def get(self, key: str) -> Any:
        return self.metadata.get(PREFIX + key)

    def array(self, key: str) -> Array:
        value = self.get(key)
        if not isinstance(value, Array):
            raise ValueError(f"{PREFIX}{key} is missing or not an array")
        return value

    def numbers(self, key: str) -> list[Any]:
        """An array with one number per token; empty if the key is missing."""
        if self.get(key) is None:
            return []
        numbers = self.array(key).numbers()
        if len(numbers) != len(self.tokens):
            raise ValueError(f"{PREFIX}{key} has {len(numbers)} entries, not {len(self.tokens)}")
        return numbers

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return value if isinstance(value, bool) else default

    def is_filler(self, id: int) -> bool:
        """Whether an entry is a placeholder for an id without a token."""
        return self.tokens[id] == f"[PAD{id}]"

    def of_kind(self, *kinds: TokenKind) -> list[str]:
        return [token for token, id in self.ids.items() if self.kinds[id] in kinds]

    def named(self) -> dict[str, str]:
        """The special tokens that chat templates can use, by name."""
        found = {name: self.token_at(key) for name, key in NAMED.items()}
        return {name: token for name, token in found.items() if token is not None}

    def token_at(self, key: str) -> str | None:
        id = self.get(key)
        if id is None and self.model == "llama":
            id = SENTENCEPIECE_IDS.get(key)
        if isinstance(id, int) and 0 <= id < len(self.tokens) and not self.is_filler(id):
            return self.tokens[id]
        if id is not None and key in NEEDED:
            raise ValueError(f"{PREFIX}{key} = {id!r} is not a token: there are {len(self.tokens)}")
        return None

    def ends(self) -> dict[str, list[int]]:
        """The tokens that end a text, by the key that names them, or by KNOWN."""
        named = {key.removesuffix("_id"): self.token_at(key) for key in ENDS}
        found = {key: [self.ids[text]] for key, text in named.items() if text is not None}
        control = {*self.of_kind(TokenKind.CONTROL)}
        added = {*self.of_kind(TokenKind.USER_DEFINED)} - {"</s>"}  # an HTML tag in Gemma
        left_out = {"<|end|>"} if control >= HARMONY else set()
        texts = (*END_TEXTS, *GEMMA_ENDS) if self.model == GEMMA4 else END_TEXTS
        known = [text for text in texts if text in (control | added) - left_out]
        return found | ({KNOWN: [self.ids[text] for text in known]} if known else {})


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build a tokenizer. Raises ValueError if it is not supported."""
    if vocabulary.model == "gpt2":
        pre = find_pre_tokenizer(vocabulary.get("pre"))
        backend, adds_bos = byte_level(vocabulary, pre), pre.adds_bos
    else:
        backend, adds_bos = sentencepiece(vocabulary), True
    special = vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    others = vocabulary.of_kind(TokenKind.USER_DEFINED)
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in others])
    add_ends(backend, vocabulary, adds_bos)
    return backend


def byte_level(vocabulary: GgufVocabulary, pre: PreTokenizer) -> Tokenizer:
    merges = [split_merge(merge) for merge in vocabulary.array("merges").strings()]
    model = models.BPE(vocabulary.ids, merges, ignore_merges=pre.takes_whole_words)
    backend = Tokenizer(model)
    if pre.is_nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    """BPE over whole texts, with ▁ for spaces and byte tokens for unknown characters."""
    if vocabulary.get("merges") is not None:
        merges = [split_merge(merge) for merge in vocabulary.array("merges").strings()]
    elif vocabulary.model == GEMMA4:
        raise ValueError(f"{PREFIX}merges is missing")
    elif scores := vocabulary.numbers("scores"):
        if vocabulary.merges_by_id:
            scores = [-id for id in range(len(scores))]
        merges = merges_by_score(vocabulary.ids, scores)
    else:
        raise ValueError("tokenizer.ggml.scores is missing")
    model = models.BPE(
        vocabulary.ids,
        merges,
        unk_token=vocabulary.named().get("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend, spaces = Tokenizer(model), normalizers.Replace(" ", "▁")
    begins = vocabulary.flag("add_space_prefix", vocabulary.model != GEMMA4)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if begins:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_by_score(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of SentencePiece's BPE, by decreasing score of the merged token.

    Merges with equal scores have the order of the tokenizer.json that transformers writes.
    """
    lengths = {len(token) for token in ids}  # skips most places to split long tokens
    found = [
        (scores[id], i, len(token) - i, token)
        for token, id in ids.items()
        for i in range(1, len(token))
        if i in lengths and len(token) - i in lengths
        if token[:i] in ids and token[i:] in ids
    ]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(token[:i], token[i:]) for _, i, _, token in found]


def add_ends(backend: Tokenizer, vocabulary: GgufVocabulary, adds_bos: bool) -> None:
    """Add bos before texts and eos after them, if the file requires it."""
    named, before, behind = vocabulary.named(), None, None
    # llama.cpp ignores the flag for Gemma 4, because published files have a wrong one.
    if vocabulary.model == GEMMA4 or vocabulary.flag("add_bos_token", adds_bos):
        before = named.get("bos_token")
    if vocabulary.flag("add_eos_token", False):
        behind = named.get("eos_token")
    if before is None and behind is None:
        return
    single = " ".join(filter(None, (before, "$A", behind)))
    pair = " ".join(filter(None, (before, "$A", before, "$B", behind)))
    tokens = [(token, vocabulary.ids[token]) for token in {before, behind} if token]
    backend.post_processor = processors.TemplateProcessing(single, pair, tokens)
