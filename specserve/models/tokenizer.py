"""Text and token ids: a folder's tokenizer, and whether two models share one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specserve.errors import ConfigError
from specserve.models.chat_template import ChatTemplate, find_chat_template
from specserve.models.folder import check_tokenizer, read_json
from specserve.models.special_tokens import read_special_tokens


class Tokenizer:
    """A pipeline of the `tokenizers` library, and the chat template that goes with it.

    Any number of threads may use it at once: encoding releases the GIL.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        name: str = "",
        chat_template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.name, self.chat_template = backend, name, chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens; TypeError or UnicodeError for anything but valid text."""
        # A batch of one: this method releases the GIL, and computes no offsets, which are not used.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text, spaces unchanged; an id without a token gives no text."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token: int) -> str | None:
        return self.backend.id_to_token(token)

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab()


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer, its chat template included; code in the folder is never run."""
    check_tokenizer(folder)
    try:
        if (folder / "tokenizer.json").exists():
            return read_tokenizer(folder)
        return convert_tokenizer(folder)
    except ConfigError:
        raise
    except Exception as e:  # the libraries raise errors of many types
        raise ConfigError(
            f"{folder}: the tokenizer cannot be loaded ({type(e).__name__}: {e}); download its "
            "files again; one that needs code of its own is not supported"
        ) from e


def read_tokenizer(folder: Path) -> Tokenizer:
    """tokenizer.json as it stands, with the tokens that the files beside it add.

    transformers does the same, but for a few classes (LlamaTokenizer, Qwen2Tokenizer,
    GPT2Tokenizer, ...) that rebuild the pipeline in code and take only vocabulary and merges from
    the file: where the two differ, the model was trained with the file's.
    """
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    known = backend.get_added_tokens_decoder()
    special = read_special_tokens(folder, config, known)
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    backend.add_tokens(special.to_add(known))
    source = find_chat_template(folder, config)
    template = ChatTemplate(source, special.variables) if source else None
    return Tokenizer(backend, str(folder), template)


def convert_tokenizer(folder: Path) -> Tokenizer:
    """Convert older files by transformers, which only they need: its import takes seconds."""
    from transformers import AutoTokenizer

    made: Any = AutoTokenizer.from_pretrained(
        folder, use_fast=True, trust_remote_code=False, local_files_only=True
    )
    if not made.is_fast:
        raise ConfigError(
            f"{folder}: {type(made).__name__} cannot be written as tokenizer.json; take a model "
            "that comes with this file"
        )
    source = made.chat_template
    source = source.get("default") if isinstance(source, dict) else source
    template = ChatTemplate(source, made.special_tokens_map) if source else None
    return Tokenizer(made.backend_tokenizer, str(folder), template)


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """ConfigError unless token ids mean the same in both models."""
    ids, draft_ids = target.get_vocab(), draft.get_vocab()
    if draft_ids != ids:
        token, _ = min(ids.items() ^ draft_ids.items(), key=lambda item: (item[1], item[0]))
        raise ConfigError(
            f"draft model {draft.name}: its tokenizer differs from the target's, first at the "
            f"token {token!r} ({draft_ids.get(token)} there, {ids.get(token)} in the target); "
            "take a draft model of the target's own family"
        )
