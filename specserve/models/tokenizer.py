"""Text and token ids: a folder's tokenizer, and whether two models share one."""

from pathlib import Path
from typing import Any

from specserve.errors import ConfigError
from specserve.models.families import DecoderConfig
from specserve.models.folder import check_tokenizer


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer, its chat template included; code in the folder is never run."""
    from transformers import AutoTokenizer  # costly

    check_tokenizer(folder)
    try:
        return AutoTokenizer.from_pretrained(
            folder, use_fast=True, trust_remote_code=False, local_files_only=True
        )
    except Exception as e:  # every tokenizer class fails in its own way
        raise ConfigError(
            f"{folder}: the tokenizer cannot be loaded ({type(e).__name__}: {e}); download its "
            "files again; one that needs code of its own is not supported"
        ) from e


def check_same_vocabulary(
    target: DecoderConfig, draft: DecoderConfig, target_tokenizer: Any, draft_tokenizer: Any
) -> None:
    """A draft model guesses token ids: they must mean the same to the target."""
    name, remedy = draft_tokenizer.name_or_path, "take a draft model of the target's own family"
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft model {name}: vocab_size is {draft.vocab_size}, and the target's is "
            f"{target.vocab_size}; {remedy}"
        )
    ids, draft_ids = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if draft_ids != ids:
        token, _ = min(ids.items() ^ draft_ids.items(), key=lambda item: (item[1], item[0]))
        raise ConfigError(
            f"draft model {name}: its tokenizer differs from the target's, first at the token "
            f"{token!r} ({draft_ids.get(token)} there, {ids.get(token)} in the target); {remedy}"
        )
