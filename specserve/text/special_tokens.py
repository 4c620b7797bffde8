"""The special tokens that a model's files name beside tokenizer.json."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from specserve.models.folder import read_json

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an AddedToken
Token = str | AddedToken
Added = dict[int, AddedToken]  # by id


class SpecialTokens(NamedTuple):
    named: dict[str, Token]  # "bos_token" -> "<s>"
    extra: list[Token]  # nameless
    added: Added  # special or not

    @property
    def variables(self) -> dict[str, str]:
        """The texts of named tokens, as variables of a chat template."""
        return {name: text_of(token) for name, token in self.named.items()}

    def to_add(self, known: Added) -> list[AddedToken]:
        """The tokens to add to a tokenizer that has the `known` ones, in the order of new ids."""
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


def read_special_tokens(folder: Path, config: Mapping[str, Any], known: Added) -> SpecialTokens:
    """By transformers' rules: tokenizer_config.json is complete if it has added_tokens_decoder;
    else the older files add to it, and so does tokenizer.json, which has the `known` tokens.
    """
    fields = read_tokens(config)
    written = fields.get("added_tokens_decoder")
    older = {} if written is not None else read_map(folder / "special_tokens_map.json")
    own = {name: token for name, token in named_in(fields).items() if name not in NAMES}
    named = named_in(fields) | named_in(older) | own
    extra = extra_in(fields) + [token for token in extra_in(older) if token not in extra_in(fields)]
    if written is not None:
        return SpecialTokens(named, extra, {int(id): token for id, token in written.items()})
    special = {text_of(token) for token in (*named.values(), *extra)}
    return SpecialTokens(named, extra, read_added(folder / "added_tokens.json", special) | known)


def named_in(fields: Mapping[str, Any]) -> dict[str, Token]:
    """Tokens with names: the usual ones, and any that a model has of its own."""
    tokens = {name: token for name, token in fields.items() if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(fields.get(key), Mapping):
            tokens |= fields[key]
    return {name: token for name, token in tokens.items() if isinstance(token, str | AddedToken)}


def extra_in(fields: Mapping[str, Any]) -> list[Token]:
    """Tokens without names."""
    tokens = fields.get("extra_special_tokens") or fields.get("additional_special_tokens")
    return list(tokens) if isinstance(tokens, list) else []


def read_map(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = read_tokens(read_json(path) if path.exists() else {})
    for token in (*fields.values(), *extra_in(fields)):
        if isinstance(token, AddedToken):
            token.special = True
    return fields


def read_added(path: Path, special: Set[str]) -> dict[int, AddedToken]:
    written = read_json(path) if path.exists() else {}
    return {
        id: AddedToken(text, special=text in special, normalized=text not in special)
        for text, id in written.items()
    }


def read_tokens(value: Any) -> Any:
    """The JSON value, with each mapping that describes a token made an AddedToken."""
    if isinstance(value, list):
        return [read_tokens(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("content"), str):
        return AddedToken(value["content"], **{k: value[k] for k in FLAGS if k in value})
    return {key: read_tokens(item) for key, item in value.items()}


def text_of(token: Token) -> str:
    return token if isinstance(token, str) else token.content
