"""The same ids and text as transformers' AutoTokenizer, whatever a folder's files say."""

import json
import logging
import sys
from subprocess import run

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

from specserve.errors import ConfigError
from specserve.text.tokenizer import load_tokenizer

CORPUS = [
    "the cat sat on the mat",
    "unreadable readers read",
    "don't   stop",
    "한국어 é à ñ 🙂 12345",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
TEXTS = [
    "",
    " ",
    "the cat sat on the mat",
    "  two  spaces , and a comma .",
    "tabs\tand\r\nlines\n\n",
    "don't won't I'll",
    "numbers 1 12 123 1234567",
    "e\u0301 é ﬁ ① Å \u2126",
    "한국어 日本語 العربية עברית ไทย",
    "🙂👩‍🔬🇩🇪 \U0001f9d1\U0001f3fd",
    "\x00\x7f\u200b\ufeff\ufffd\u2028\U0010ffff",
    "<s>the</s> <|think|>  <extra>x<pad><more><tool> <|tool|>",
    "▁the ▁ cat Ġthe",
    "x" * 300,
]


def trained(tokenizer, trainer):
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer = trained(tokenizer, trainer)
    tokenizer.add_tokens(["<|tool|>"])
    return tokenizer


def llama_3():
    """Byte-level, split by an expression; its post-processor begins every text."""
    tokenizer = byte_level()
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, as_bytes])
    begin = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), begin]
    )
    return tokenizer


def metaspace():
    """SentencePiece's BPE as Llama 2 and Mistral have it, with bytes for what is unknown."""
    vocab = {token: i for i, token in enumerate(SPECIAL)}
    vocab |= {f"<0x{i:02X}>": len(vocab) + i for i in range(256)}
    letters = sorted({"▁", *"".join(CORPUS).replace(" ", "▁")})
    vocab |= {letter: len(vocab) + i for i, letter in enumerate(letters)}
    vocab |= {pair: len(vocab) + i for i, pair in enumerate(["▁t", "he", "▁the", "at"])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t")]
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
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
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, unk_token="<unk>", special_tokens=SPECIAL, show_progress=False
    )
    return trained(tokenizer, trainer)


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=SPECIAL, show_progress=False)
    return trained(tokenizer, trainer)


def bounded():
    """A file that was saved while it padded and truncated."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16, pad_token="<pad>", pad_id=3)
    return tokenizer


KINDS = {f.__name__: f for f in (byte_level, llama_3, metaspace, unigram, word_piece, bounded)}
THINK = {"content": "<|think|>", "lstrip": True, "rstrip": True, "normalized": False}
FILES = {  # what stands beside tokenizer.json
    "nothing": {},
    "names": {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}},
    "a token that the vocabulary lacks": {"tokenizer_config.json": {"eos_token": "<|think|>"}},
    "a name for a token that was not special": {"tokenizer_config.json": {"eos_token": "<|tool|>"}},
    "flags of bos and eos": {
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": True,
            "add_eos_token": True,
        }
    },
    "extra tokens": {
        "tokenizer_config.json": {
            "extra_special_tokens": ["<extra>", {"__type": "AddedToken", **THINK}]
        }
    },
    "additional tokens": {
        "tokenizer_config.json": {"additional_special_tokens": ["<extra>", "<|think|>"]}
    },
    "tokens with names of their own": {
        "tokenizer_config.json": {
            "image_token": "<extra>",
            "extra_special_tokens": {"think_token": "<|think|>"},
        }
    },
    "added tokens": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "900": {**THINK, "single_word": False, "special": False},
                "901": {"content": "<extra>", "special": True},
            },
            "eos_token": "<|think|>",
            "pad_token": "<|tool|>",
        },
        "special_tokens_map.json": {"bos_token": "<s>"},
    },
    "an older map": {
        "tokenizer_config.json": {"eos_token": "<s>", "image_token": "<extra>"},
        "special_tokens_map.json": {
            "eos_token": {"content": "<|think|>", "lstrip": True, "special": False},
            "image_token": "<pad>",
            "extra_special_tokens": ["<more>", {"content": "<tool>"}],
        },
    },
    "older added tokens": {
        "tokenizer_config.json": {"pad_token": "<extra>"},
        "added_tokens.json": {"<|think|>": 900, "<extra>": 901},
    },
    "special tokens are text": {
        "tokenizer_config.json": {"split_special_tokens": True, "eos_token": "</s>"}
    },
}


@pytest.fixture(scope="module")
def saved():
    """tokenizer.json of every kind."""
    return {name: make().to_str() for name, make in KINDS.items()}


def write(folder, tokenizer, files):
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    for name, fields in files.items():
        (folder / name).write_text(json.dumps(fields))
    return folder


def both(folder):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def check_equal(ours, theirs, texts=TEXTS):
    assert ours.get_vocab() == theirs.get_vocab()
    for text in texts:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special) == ids, text
            for skip in (True, False):
                want = theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
                assert ours.decode(ids, skip) == want, text


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_transformers(tmp_path, saved, kind, files):
    check_equal(*both(write(tmp_path, saved[kind], files)))


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_templates_get_the_special_tokens_that_transformers_gives_them(tmp_path, saved, files):
    names = ["bos_token", "eos_token", "pad_token", "unk_token", "image_token", "think_token"]
    shown = "".join(f"[{name}={{{{ {name} }}}}]" for name in names)
    (tmp_path / "chat_template.jinja").write_text(shown)
    ours, theirs = both(write(tmp_path, saved["byte_level"], files))
    messages = [{"role": "user", "content": "hi"}]
    assert ours.chat_template.render(messages) == theirs.apply_chat_template(
        messages, tokenize=False
    )


@pytest.fixture(scope="module")
def pairs(saved, tmp_path_factory):
    return {
        kind: both(write(tmp_path_factory.mktemp(kind), saved[kind], FILES["extra tokens"]))
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_any_text_has_the_same_tokens(pairs, kind, text):
    check_equal(*pairs[kind], [text])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=20))
def test_any_tokens_have_the_same_text(pairs, kind, ids):
    ours, theirs = pairs[kind]
    for skip in (True, False):
        want = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip) == want


def check_bytes(tokenizer, text, ids):
    """The bytes of a text's tokens are the text; a space that decoders leave out of its beginning
    aside.
    """
    joined = b"".join(tokenizer.token_bytes(token) for token in ids).decode()
    assert text in (joined, joined.removeprefix(" "))


EXACT = "byte_level", "llama_3", "bounded"  # they change no text


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_texts_tokens_are_the_text(pairs, kind):
    ours, _ = pairs[kind]
    for text in TEXTS:
        ids = ours.encode(text)
        check_bytes(ours, ours.decode(ids, skip_special_tokens=False), ids)
        if kind in EXACT and "<" not in text:
            check_bytes(ours, text, ours.encode(text, add_special_tokens=False))


def test_tokens_that_are_parts_of_characters_have_the_bytes_of_these(pairs):
    for kind in ("byte_level", "metaspace"):
        ours, _ = pairs[kind]
        ids = ours.encode("\U0010ffff", add_special_tokens=False)[-4:]
        assert [ours.token_bytes(token) for token in ids] == [b"\xf4", b"\x8f", b"\xbf", b"\xbf"]


def test_special_tokens_have_the_bytes_that_they_are_written_with(pairs):
    for kind in ("byte_level", "metaspace"):
        ours, _ = pairs[kind]
        for token in ("<s>", "</s>", "<extra>", "<|think|>"):
            assert ours.token_bytes(ours.get_vocab()[token]) == token.encode()
        assert ours.token_bytes(100_000) == b""
        assert ours.special_ids >= {ours.get_vocab()["<s>"], ours.get_vocab()["<extra>"]}


VOCAB = {token: i for i, token in enumerate([*SPECIAL, "▁", "t", "h", "e", "Ġ", "th", "the"])}
MERGES = [("t", "h"), ("th", "e")]


@pytest.mark.parametrize(
    "made",
    [
        LlamaTokenizer(vocab=dict(VOCAB), merges=MERGES),
        LlamaTokenizer(vocab=dict(VOCAB), merges=MERGES, add_prefix_space=False),
        Qwen2Tokenizer(vocab=dict(VOCAB), merges=MERGES),
        GPT2Tokenizer(vocab=dict(VOCAB), merges=MERGES, unk_token="<unk>"),
    ],
    ids=lambda made: type(made).__name__,
)
def test_what_a_class_of_transformers_has_saved_is_read_as_it_reads_it(tmp_path, made):
    made.save_pretrained(tmp_path)
    check_equal(*both(tmp_path))


def test_the_file_wins_over_a_class_that_would_split_text_otherwise(tmp_path, saved):
    """transformers' GPT2Tokenizer leaves the split of digits out, which SmolLM was trained with."""
    config = {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<unk>"}}
    ours = load_tokenizer(write(tmp_path, saved["llama_3"], config))
    assert ours.encode("1234") == Tokenizer.from_str(saved["llama_3"]).encode("1234").ids


def test_a_folder_without_tokenizer_json_is_converted_to_the_same(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps(VOCAB | {"a": 11, "<|endoftext|>": 12}))
    (tmp_path / "merges.txt").write_text("t h\nth e\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "chat_template": "{{ eos_token }}"})
    )
    ours, theirs = both(tmp_path)
    check_equal(ours, theirs)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.chat_template.render(messages) == "<|endoftext|>"


def test_older_files_that_cannot_be_written_as_tokenizer_json_are_refused(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"t": 0, "h": 1, "<unk>": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ctrl"}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    with pytest.raises(ConfigError, match=r"CTRLTokenizer cannot be written as tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_folder_with_tokenizer_json_needs_no_transformers(tmp_path, saved):
    write(tmp_path, saved["llama_3"], FILES["older added tokens"])
    code = (
        "import sys; from pathlib import Path; sys.modules['transformers'] = None;"
        "sys.modules['torch'] = None; from specserve.api.input_processor import load_text_files;"
        f"files = load_text_files(Path({str(tmp_path)!r})); assert files.tokenizer.encode('the')"
    )
    (tmp_path / "config.json").write_text("{}")
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
