"""How text is split before byte-level BPE, by the name in `tokenizer.ggml.pre`.

As the tokenizer.json of the models that the names stand for have it.
"""

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = LETTERS + r"|\p{N}{1,3}" + REST
QWEN_2 = LETTERS + r"|\p{N}" + REST
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    splits: tuple[str, ...]  # expressions, one after the other: matches and what is between
    is_nfc: bool = False
    takes_whole_words: bool = False  # a word that is a token needs no merges
    adds_bos: bool = False  # where the file does not say

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits]
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, as_bytes])


LLAMA_BPE = PreTokenizer((LLAMA_3,), takes_whole_words=True, adds_bos=True)
PRE_TOKENIZERS = {
    "deepseek-r1-qwen": PreTokenizer((QWEN_2,)),
    # llama.cpp's own, for models that it has no other for.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2,)),
    "llama-bpe": LLAMA_BPE,
    "llama-v3": LLAMA_BPE,
    "llama3": LLAMA_BPE,
    "qwen2": PreTokenizer((QWEN_2,), is_nfc=True),
    "smaug-bpe": PreTokenizer((LLAMA_3,), takes_whole_words=True),  # SmolLM3, too
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "tekken": PreTokenizer((TEKKEN,), takes_whole_words=True, adds_bos=True),
}


def find_pre_tokenizer(name: object) -> PreTokenizer:
    """llama.cpp's default for a file without a name. ValueError for a name that is not known: text
    might be split in another way than in training.
    """
    if name is None:
        return PRE_TOKENIZERS["default"]
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"tokenizer.ggml.pre = {name!r} is not supported: {known} are supported")
    return PRE_TOKENIZERS[name]
