"""A GGUF file's tokenizer gives the tokens of the tokenizer that it was made of."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from specserve.models.source import open_source
from tests.models.gguf_files import write
from tests.models.test_tokenizer_parity import TEXTS

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
CORPUS = [
    "the cat sat on the mat, and the other cat sat on 12345 other mats",
    "def read_lines(path):\n    with open(path) as file:\n\n        return [1, 22, 333]\n",
    "don't   stop. We'LL SEE: IT'S 3.14!!! HelloWorld camelCase\t\ttabs ... ======",
    "한국어 日本語 éàñ e\u0301 🙂👩‍🔬 Привет мир, как дела? ﬁ Å",
] * 3
TRICKY = [
    *TEXTS,
    "I've we'VE it'S HelloWorld HTTPServer 3.14 1234567 ١٢٣ ²³",
    "a\n\n\nb \n c\r\n\r\n  d\t\t e   \n",
    "  leading and trailing  ",
    "/* comment */ // x\n\n/path/to",
    "<|im_end|>the<|im_end|> <|im_end|>\n<think> the</think>x",
    "\uff46\uff55\uff4c\u3000\uff57 ٣٤٥ ½ Ⅷ $100 <=> ~^|`",
]


def byte_level(split, normalizer=None, ignore_merges=False, adds_bos=False):
    """As a tokenizer.json of today has it: words by a split, then BPE of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.ignore_merges = ignore_merges
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if adds_bos:
        tokenizer.post_processor = begin()
    return with_added(tokenizer)


def with_added(tokenizer):
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


def begin():
    """Every text begins with <s>."""
    return processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])


AS_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split_by(expression):
    return [pre_tokenizers.Split(Regex(expression), "isolated"), AS_BYTES]


def llama_3(adds_bos=True):
    return byte_level(split_by(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), None, True, adds_bos)


def qwen_2():
    made = Qwen2Tokenizer().backend_tokenizer
    return byte_level([made.pre_tokenizer], made.normalizer)


def smollm():
    return byte_level([pre_tokenizers.Digits(individual_digits=True), GPT2_BYTES])


def gpt_2():
    return byte_level([GPT2_BYTES])


def tekken():
    return byte_level(split_by(GGUF_PRE_TOKENIZER_SPLITS["tekken"]), None, True, True)


def sentencepiece():
    """As transformers writes Llama 2's: merges by scores, bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    tokenizer.train_from_iterator([f"▁{t}".replace(" ", "▁") for t in CORPUS], trainer)
    learned = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    texts = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    texts += sorted((t for t in learned if t not in SPECIAL), key=lambda t: (len(t) == 1, 0))
    vocab = {text: id for id, text in enumerate(texts)}
    scores = {text: -float(id) for text, id in vocab.items()}
    merges = generate_merges(vocab, scores)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = begin()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    return with_added(tokenizer)


KINDS = {
    "gpt-2": gpt_2,
    "llama-bpe": llama_3,
    "qwen2": qwen_2,
    "smaug-bpe": lambda: llama_3(adds_bos=False),
    "smollm": smollm,
    "tekken": tekken,
    None: sentencepiece,
}


def model(folder, pre, tokenizer, **config):
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"} | config
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(names)}
    return write(folder, "llama", pre=pre, files=files, vocab_size=600, eos_token_id=3)


@pytest.fixture(scope="module", params=KINDS.items(), ids=lambda kind: str(kind[0]))
def pair(request, tmp_path_factory):
    """The tokenizers of a file, and of the folder that it was made of."""
    pre, make = request.param
    files = model(tmp_path_factory.mktemp("model"), pre, make())
    return open_source(files.file).tokenizer(), open_source(files.plain).tokenizer()


def check_equal(ours, theirs, text):
    for special in (True, False):
        ids = theirs.encode(text, special)
        assert ours.encode(text, special) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip)


def test_tokens_are_those_of_the_folder(pair):
    ours, theirs = pair
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TRICKY:
        check_equal(ours, theirs, text)


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=40))
def test_any_text_has_the_same_tokens(pair, text):
    check_equal(*pair, text)
