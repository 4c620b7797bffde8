"""How texts are split before byte-level BPE, by the names of `tokenizer.ggml.pre`."""

# ruff: noqa: RUF001  # the expressions list letters of many scripts

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    splits: tuple[str, ...]  # regular expressions that split the text, applied in turn
    is_nfc: bool = False
    takes_whole_words: bool = False  # a word that is a token needs no merges
    adds_bos: bool = False  # default if the file lacks add_bos_token


SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LETTERS = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
LLAMA_3 = LETTERS + r"|\p{N}{1,3}" + REST
QWEN_2 = LETTERS + r"|\p{N}" + REST
QWEN_35 = SUFFIX + (
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WITH_PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES


def cased(suffix: str, digits: str, rest: str, kinds: tuple[str, str] = (UPPER, LOWER)) -> str:
    """Words that begin anew at an upper-case letter after a lower-case letter."""
    before, (upper, lower) = r"[^\r\n\p{L}\p{N}]?", kinds
    words = f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
    return f"{words}|{digits}{rest}"


TEKKEN = cased("", r"\p{N}", WITH_PATHS)
GPT_4O = cased(SUFFIX + "?", r"\p{N}{1,3}", WITH_PATHS)
CJK = "[一-龥぀-ゟ゠-ヿ]+"
DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    CJK,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + SPACES,
)
HAN = r"\p{Han}"
NOT_HAN = tuple(f"[{kind[1:-1]}&&[^{HAN}]]" for kind in (UPPER, LOWER))
KIMI_2 = f"[{HAN}]+|" + cased(SUFFIX + "?", r"\p{N}{1,3}", REST, (NOT_HAN[0], NOT_HAN[1]))
DEEPSEEK_LETTERS = (  # with upper and lower case, except Armenian's and some of Georgian's
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫ"
    "ᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟"
    "𞤀-𞥃"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
SUPER_BPE = (r"\p{N}+", r"(?=(\d{3})+(?!\d))")  # digits by threes, from the right
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + CJK
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
SEED_CODER = LETTERS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + SPACES
EXAONE_MOE = SUFFIX + (
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
JAIS_2 = (
    LETTERS
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    + "".join(
        rf"|\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
    )
    + r"|\s{1}"
)

PLAIN, DIGITS = PreTokenizer((GPT2,)), PreTokenizer((r"\p{N}", GPT2))
LLAMA_BPE = PreTokenizer((LLAMA_3,), takes_whole_words=True, adds_bos=True)
QWEN = PreTokenizer((QWEN_2,))
OF_GPT_4O = PreTokenizer((GPT_4O,))
BY_THREES = PreTokenizer((LLAMA_3,))
OF_GLM = PreTokenizer((LLAMA_3,), takes_whole_words=True)
DEEPSEEK = PreTokenizer(DEEPSEEK_3)
PRE_TOKENIZERS = {
    # llama.cpp's default, for models without a specific one.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo"), PLAIN),
    **dict.fromkeys(("jais", "trillion", "granite-docling", "exaone4"), PLAIN),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone"), DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), DIGITS),
    "command-r": PreTokenizer((r"\p{N}", GPT2), is_nfc=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), LLAMA_BPE),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), LLAMA_BPE),
    "dbrx": BY_THREES,
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), OF_GLM),
    "smaug-bpe": PreTokenizer((LLAMA_3,), takes_whole_words=True),  # SmolLM3, too
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", LETTERS + r"|\p{N}+" + REST), takes_whole_words=True),
    "jais-2": PreTokenizer((JAIS_2,)),
    "qwen2": PreTokenizer((QWEN_2,), is_nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2"), QWEN),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), QWEN),
    "qwen35": PreTokenizer((QWEN_35,), is_nfc=True),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", QWEN_2)),
    "ufakzeka": PreTokenizer((QWEN_2.removeprefix(SUFFIX + "|"),)),
    "tekken": PreTokenizer((TEKKEN,), takes_whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), OF_GPT_4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", GPT_4O))),
    "youtu": PreTokenizer(
        (YOUTU, cased(SUFFIX + "?", r"\p{N}", WITH_PATHS)), takes_whole_words=True
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK),
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM),
    "kimi-k2": PreTokenizer((KIMI_2,), takes_whole_words=True),
    "superbpe": PreTokenizer(SUPER_BPE),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((BLOOM,))),
    "viking": PreTokenizer((BLOOM, r"\p{N}")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((BAILING,))),
    "seed-coder": PreTokenizer((SEED_CODER,)),
    "exaone-moe": PreTokenizer((EXAONE_MOE,)),
}


def find_pre_tokenizer(name: object) -> PreTokenizer:
    """The pre-tokenizer of a name; None is llama.cpp's default. Raises ValueError for an unknown
    name, because text could be split in another way than in training.
    """
    if name is None:
        return PRE_TOKENIZERS["default"]
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ValueError(f"tokenizer.ggml.pre = {name!r} is not supported, only {known}")
    return PRE_TOKENIZERS[name]
