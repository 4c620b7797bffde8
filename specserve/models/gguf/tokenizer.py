"""A tokenizer built from a GGUF file's metadata: byte-level BPE, or SentencePiece's."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from specserve.models.gguf.cursor import Array, Value
from specserve.models.gguf.pretokenizers import PreTokenizer, find_pre_tokenizer
from specserve.models.gguf.vocabulary import PREFIX, GgufVocabulary, TokenKind, find_model


def check_tokenizer(metadata: dict[str, Value | Array]) -> None:
    """ValueError for a kind that is not supported; its tokens are not decoded."""
    if find_model(metadata) == "gpt2":
        find_pre_tokenizer(metadata.get(f"{PREFIX}pre"))


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """ValueError if the metadata describe none that is supported."""
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
    backend.pre_tokenizer = pre.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    """BPE over whole texts in which ▁ stands for a space, with bytes for unknown characters."""
    unknown = vocabulary.named().get("unk_token")
    model = models.BPE(
        vocabulary.ids,
        sentencepiece_merges(vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend, spaces = Tokenizer(model), normalizers.Replace(" ", "▁")
    begins = vocabulary.flag("add_space_prefix", True)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if begins:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def sentencepiece_merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    if vocabulary.get("merges") is not None:
        return [split_merge(merge) for merge in vocabulary.array("merges").strings()]
    scores = vocabulary.numbers("scores")
    if not scores:
        raise ValueError("tokenizer.ggml.scores is missing")
    return merges_by_score(vocabulary.ids, scores)


def merges_by_score(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """What merges SentencePiece's BPE makes, of which only results have scores: the best first.

    Equal ones are ordered as in the tokenizer.json that transformers writes.
    """
    lengths = {len(token) for token in ids}  # few: to cut at every place of a long token is slow
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
    """Put bos before texts and eos behind them, where the file asks for it."""
    named, before, behind = vocabulary.named(), None, None
    if vocabulary.flag("add_bos_token", adds_bos):
        before = named.get("bos_token")
    if vocabulary.flag("add_eos_token", False):
        behind = named.get("eos_token")
    if before is None and behind is None:
        return
    single = " ".join(filter(None, (before, "$A", behind)))
    pair = " ".join(filter(None, (before, "$A", before, "$B", behind)))
    tokens = [(token, vocabulary.ids[token]) for token in {before, behind} if token]
    backend.post_processor = processors.TemplateProcessing(single, pair, tokens)
