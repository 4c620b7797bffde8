"""The vocabulary in a GGUF file's metadata, and which of its tokens are special."""

from enum import IntEnum
from typing import Any

from specserve.models.gguf.cursor import Array, Value

PREFIX = "tokenizer.ggml."
NAMED = {  # as chat templates know them -> their keys in the file
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
SENTENCEPIECE_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # by default
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
NEEDED = ("bos_token_id", *ENDS)  # wrong ids of others, as some files have, do no harm
KNOWN = "known text"  # as a place that names an end token
# Control or added tokens that end a text, whatever the metadata name; llama.cpp ends at them, too.
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
HARMONY = {"<|return|>", "<|call|>"}  # ends of gpt-oss's texts, whose <|end|> ends only a message


class TokenKind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def find_model(metadata: dict[str, Value | Array]) -> str:
    """The kind of tokenizer; ValueError for one that is not supported."""
    model = metadata.get(f"{PREFIX}model")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"{PREFIX}model = {model!r} is not supported: gpt2 and llama are")
    return str(model)


class GgufVocabulary:
    """The fields of a tokenizer; ValueError where they are missing or do not fit each other."""

    def __init__(self, metadata: dict[str, Value | Array]) -> None:
        self.metadata = metadata
        self.model = find_model(metadata)
        self.tokens = self.array("tokens").strings()
        self.kinds = self.numbers("token_type") or [TokenKind.NORMAL] * len(self.tokens)
        kept = [(token, id) for id, token in enumerate(self.tokens) if not self.is_filler(id)]
        self.ids = dict(kept)
        if len(self.ids) < len(kept):
            raise ValueError(f"{PREFIX}tokens has a token twice")

    def get(self, key: str) -> Any:
        return self.metadata.get(PREFIX + key)

    def array(self, key: str) -> Array:
        value = self.get(key)
        if not isinstance(value, Array):
            raise ValueError(f"{PREFIX}{key} is missing, or is no array")
        return value

    def numbers(self, key: str) -> list[Any]:
        """A number for each token; none if there are none."""
        if self.get(key) is None:
            return []
        numbers = self.array(key).numbers()
        if len(numbers) != len(self.tokens):
            raise ValueError(f"{PREFIX}{key} has {len(numbers)} for {len(self.tokens)} tokens")
        return numbers

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return value if isinstance(value, bool) else default

    def is_filler(self, id: int) -> bool:
        """Whether it stands for an id of the embedding that has no token."""
        return self.tokens[id] == f"[PAD{id}]"

    def of_kind(self, *kinds: TokenKind) -> list[str]:
        return [token for token, id in self.ids.items() if self.kinds[id] in kinds]

    def named(self) -> dict[str, str]:
        """The special tokens that have names."""
        found = {name: self.token_at(key) for name, key in NAMED.items()}
        return {name: token for name, token in found.items() if token is not None}

    def token_at(self, key: str) -> str | None:
        id = self.get(key)
        if id is None and self.model == "llama":
            id = SENTENCEPIECE_IDS.get(key)
        if isinstance(id, int) and 0 <= id < len(self.tokens) and not self.is_filler(id):
            return self.tokens[id]
        if id is not None and key in NEEDED:
            raise ValueError(f"{PREFIX}{key} = {id!r} is none of its {len(self.tokens)} tokens")
        return None

    def ends(self) -> dict[str, list[int]]:
        """The tokens that end a text, by the key that names them or as known texts."""
        named = {key.removesuffix("_id"): self.token_at(key) for key in ENDS}
        found = {key: [self.ids[text]] for key, text in named.items() if text is not None}
        control = {*self.of_kind(TokenKind.CONTROL)}
        added = {*self.of_kind(TokenKind.USER_DEFINED)} - {"</s>"}  # Gemma has this tag of HTML
        left_out = {"<|end|>"} if control >= HARMONY else set()
        known = [text for text in END_TEXTS if text in (control | added) - left_out]
        return found | ({KNOWN: [self.ids[text] for text in known]} if known else {})
