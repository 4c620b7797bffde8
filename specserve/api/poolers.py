"""How a model's folder says that embeddings and scores are made, in the files of
sentence-transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from specserve.config import Config
from specserve.errors import ConfigError
from specserve.exchange.sampling_params import Pooling
from specserve.models.decoder_config import DecoderConfig
from specserve.models.folder import is_gguf, read_json
from specserve.models.source import open_source
from specserve.text.tokenizer import Tokenizer

MODULES, CONFIG = "modules.json", "config.json"
POOLING = Path("1_Pooling", CONFIG)
MODES = {  # field of older files, and mode of newer ones -> what is pooled
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "mean": "mean",
}
GGUF_KINDS: dict[Any, Literal["last", "mean"]] = {
    1: "mean",
    3: "last",
}  # values of a GGUF file's pooling_type; 0: none
# Activations of sentence-transformers -> whether scores are between 0 and 1
ACTIVATIONS = {
    "torch.nn.modules.activation.Sigmoid": True,
    "torch.nn.modules.linear.Identity": False,
}


class Embedder(msgspec.Struct, frozen=True):
    """How a prompt becomes an embedding.

    normalizes  embeddings have the length 1
    prompts     texts before an input, by name
    default     the text before inputs whose request names no prompt
    size        numbers per embedding
    """

    pooling: Pooling
    normalizes: bool
    prompts: dict[str, str]
    default: str
    size: int


class Ranker(msgspec.Struct, frozen=True):
    """How a query and a document become a score.

    pooling       a classifier's output, or the logits of two tokens: irrelevant, relevant
    has_template  the chat template has the roles `query` and `document`
    squashes      scores are between 0 and 1, by the logistic function
    """

    pooling: Pooling
    has_template: bool
    squashes: bool


class Poolers(msgspec.Struct, frozen=True):
    """What a model can do besides generating text; None: it cannot, for the reason in `why_not`."""

    embedder: Embedder | None = None
    ranker: Ranker | None = None
    why_not: str = ""


NO_POOLERS = Poolers()
STAGED = Poolers(
    why_not="the hidden states are in the last stage of the pipeline. Start with "
    "parallel.pipeline = 1"
)


def poolers_of(config: Config, path: Path, tokenizer: Tokenizer) -> Poolers:
    """Return what the target model at the path can do. ConfigError for what is not supported."""
    model = config.model
    found = find_poolers(path, model.task, tokenizer, model.implementation)
    return STAGED if config.parallel.pipeline > 1 else found


def find_poolers(path: Path, task: str, tokenizer: Tokenizer, implementation: str) -> Poolers:
    """Read a model's files. `task` replaces missing ones. ConfigError for what is not supported."""
    shape = open_source(path).shape(implementation)
    labels = shape.num_labels if isinstance(shape, DecoderConfig) else 0
    modules = find_modules(path)
    if labels:
        if task == "embed":
            raise ConfigError(f"{path}: a sequence classifier has no embeddings. Set task = auto")
        if labels > 1:
            words = f"the model classifies {labels} labels, and a score needs a single one"
            return Poolers(why_not=words)
        ranker = Ranker(Pooling("score"), False, squashes(path))
        return Poolers(ranker=ranker)
    if task == "rank" or "LogitScore" in modules:
        return Poolers(ranker=token_ranker(path, modules, tokenizer))
    in_file = gguf_pooling(path, task)
    if in_file is not None:
        return Poolers(embedder=Embedder(Pooling(in_file), True, {}, "", shape.hidden_size))
    if task == "embed" or "Pooling" in modules or (path / POOLING).is_file():
        return Poolers(embedder=find_embedder(path, modules, shape.hidden_size))
    return Poolers(
        why_not="the model has no file 1_Pooling/config.json. Serve a model for embeddings, or "
        "start with --task embed to use the last token's hidden state"
    )


def find_modules(path: Path) -> dict[str, Path]:
    """Return the folders of sentence-transformers' modules, by the last part of their types."""
    file = path / MODULES
    if not file.is_file():
        return {}
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        found = {entry["type"].rpartition(".")[2]: path / entry["path"] for entry in listed}
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as e:
        raise ConfigError(f"{file} is not a list of modules ({e}). Download it again") from e
    known = "Transformer", "Pooling", "Normalize", "LogitScore"
    for name, folder in found.items():
        if name not in known:
            raise ConfigError(
                f"{file}: the module {name} is not supported, only {', '.join(known)}. Use "
                "another model"
            )
        if not folder.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"{file}: the path of {name} is outside the model's folder")
    return found


def gguf_pooling(path: Path, task: str) -> Literal["last", "mean"] | None:
    """Return what a GGUF file says is pooled; None: nothing. ConfigError if the task is `embed` and
    the pooling is another one.
    """
    if not (path.is_file() and is_gguf(path)):
        return None
    from specserve.models.gguf.header import read_header  # slow to import, and rarely needed

    metadata = read_header(path).metadata
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if kind in GGUF_KINDS:
        return GGUF_KINDS[kind]
    if kind != 0 and task == "embed":
        raise ConfigError(
            f"{path}: pooling_type = {kind!r} is not supported, only 1 (the mean) and 3 (the last "
            "token). Use another model"
        )
    return None


def find_embedder(path: Path, modules: Mapping[str, Path], size: int) -> Embedder:
    file = modules["Pooling"] / CONFIG if "Pooling" in modules else path / POOLING
    # Without any file, the operator chose the task.
    kind = pooled_by(file) if file.is_file() or "Pooling" in modules else "last"
    given = path / "config_sentence_transformers.json"
    fields = read_json(given) if given.is_file() else {}
    prompts, default = fields.get("prompts") or {}, fields.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise ConfigError(f"{given}: prompts must be texts by name. Correct the file")
    if default is not None and default not in prompts:
        raise ConfigError(f"{given}: default_prompt_name = {default!r} is not among its prompts")
    is_normal = "Normalize" in modules or not modules
    return Embedder(Pooling(kind), is_normal, prompts, prompts.get(default, ""), size)


def pooled_by(file: Path) -> Literal["last", "mean"]:
    fields = read_json(file)
    named = fields.get("pooling_mode") or [k for k, v in fields.items() if "_mode_" in k and v]
    names = [named] if isinstance(named, str) else named
    known = {MODES.get(name) for name in names} if isinstance(names, list) else {None}
    if len(known) != 1 or None in known:
        raise ConfigError(
            f"{file}: pooling by {names} is not supported, only by the last token or the mean. Use "
            "another model"
        )
    if fields.get("include_prompt") is False:
        raise ConfigError(f"{file}: include_prompt = false is not supported. Use another model")
    return "last" if "last" in known else "mean"


def token_ranker(path: Path, modules: Mapping[str, Path], tokenizer: Tokenizer) -> Ranker:
    """Return the ranker of a model that answers with one of two tokens."""
    ids: list[Any] = [tokenizer.backend.token_to_id(text) for text in ("no", "yes")]
    if "LogitScore" in modules:
        fields = read_json(modules["LogitScore"] / CONFIG)
        ids = [fields.get(name) for name in ("false_token_id", "true_token_id")]
    if not all(isinstance(token, int) for token in ids):
        raise ConfigError(
            f"{path}: ranking needs the ids of two tokens, and found {ids}. Use a model with the "
            "tokens yes and no"
        )
    template = tokenizer.chat_template
    sources = "" if template is None else "".join(template.sources)
    has_roles = all(f"{quote}{role}{quote}" in sources for role, quote in roles_in(sources))
    return Ranker(Pooling("logits", tuple(ids)), bool(sources) and has_roles, squashes(path))


def roles_in(source: str) -> list[tuple[str, str]]:
    """Return the roles of a pair, each with the quote that the template writes around it."""
    return [(role, "'" if f"'{role}'" in source else '"') for role in ("query", "document")]


def squashes(path: Path) -> bool:
    """Whether a ranker's scores pass the logistic function. ConfigError for another activation."""
    places = (path / "config_sentence_transformers.json", path / CONFIG)
    fields = [read_json(file) for file in places if file.is_file()]
    named = next((f["activation_fn"] for f in fields if f.get("activation_fn")), None)
    for each in fields:
        own = each.get("sentence_transformers")
        named = own.get("activation_fn", named) if isinstance(own, dict) else named
        named = each.get("sbert_ce_default_activation_function", named)
    if named is None:
        return True
    if named not in ACTIVATIONS:
        raise ConfigError(
            f"{path}: the activation {named!r} of scores is not supported, only "
            f"{', '.join(ACTIVATIONS)}. Correct config.json"
        )
    return ACTIVATIONS[named]
