"""A vocabulary of 152 thousand tokens, as large models have, made of words and of no model."""

import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SIZE = 151_936  # ids of Qwen's models
END = "<|end|>"
PIECE = re.compile(r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+|[0-9]")
SCRIPTS = {  # first and last character -> the longest word, and how many of them
    ("\u4e00", "\u9fff"): (3, 25_000),
    ("\u0410", "\u044f"): (7, 12_000),
    ("\uac00", "\ud7a3"): (3, 8_000),
    ("\u3041", "\u30ff"): (4, 4_000),
    ("\u0621", "\u064a"): (6, 6_000),
}


@cache
def large_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: what matters are the bytes of its tokens. Its last id ends a
    text.
    """
    vocabulary = {text: id for id, text in enumerate(tokens())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def tokens() -> list[str]:
    """Bytes, the standard library's pieces from the most frequent on, words of other scripts, and
    beginnings of words, in the characters that byte-level BPE writes for bytes.
    """
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = dict.fromkeys(sorted(level.alphabet()))
    for piece in pieces():
        if len(found) == SIZE - 1:
            break
        found.setdefault("".join(part for part, _ in level.pre_tokenize_str(piece)))
    assert len(found) == SIZE - 1, f"only {len(found)} tokens were found"
    return [*found]


def pieces() -> Iterator[str]:
    counts = Counter[str]()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" not in path.parts:
            counts.update(PIECE.findall(path.read_text(errors="replace")))
    words = [piece for piece, _ in counts.most_common() if len(piece) < 32]
    yield from words
    chance = random.Random(0)
    for (first, last), (longest, number) in SCRIPTS.items():
        for _ in range(number):
            codes = chance.choices(range(ord(first), ord(last) + 1), k=chance.randint(1, longest))
            yield "".join(map(chr, codes))
    yield from (word[:end] for word in words for end in range(2, len(word)))
