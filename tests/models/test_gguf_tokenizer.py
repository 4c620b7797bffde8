"""A GGUF file's tokenizer gives the tokens of the tokenizer that it was made of."""

import json
from random import Random

import pytest
import regex
from gguf import GGUFValueType
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
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)
from transformers.tokenization_utils_base import generate_merges

from specserve.errors import ConfigError
from specserve.models.end_tokens import find_end_tokens
from specserve.models.gguf.pre_tokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from specserve.models.gguf.tokenizer import GgufVocabulary, TokenKind, merges_by_score, split_merge
from specserve.models.source import open_source
from tests.checkpoints import EOS
from tests.models.gguf_files import GEMMA3, put_tokenizer, write
from tests.text.test_tokenizer_parity import TEXTS, check_bytes

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
    "a xyzzy and <unk> beside x<unk>",
    "/* comment */ // x\n\n/path/to",
    "<|im_end|>the<|im_end|> <|im_end|>\n<think> the</think>x",
    "\uff46\uff55\uff4c\u3000\uff57 ٣٤٥ ½ Ⅷ $100 <=> ~^|`",
]


def byte_level(split, normalizer=None, ignore_merges=False, adds_bos=False):
    """As a tokenizer.json of today has it: words by a split, then BPE of bytes.

    It has learned merges across words, so that every split counts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = AS_BYTES
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer = with_word(tokenizer, ignore_merges)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if adds_bos:
        tokenizer.post_processor = begin()
    return with_added(tokenizer)


def with_word(tokenizer, ignore_merges):
    """With a word that no merges make."""
    made = json.loads(tokenizer.to_str())
    made["model"]["vocab"]["Ġxyzzy"] = len(made["model"]["vocab"])
    made["model"]["ignore_merges"] = ignore_merges
    return Tokenizer.from_str(json.dumps(made))


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


def model(folder, pre, tokenizer, edit=None):
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"}
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(names)}
    return write(folder, "llama", pre=pre, files=files, edit=edit, vocab_size=600, eos_token_id=3)


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
        ids = ours.encode(text)
        check_bytes(ours, ours.decode(ids, skip_special_tokens=False), ids)


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=40))
def test_any_text_has_the_same_tokens(pair, text):
    check_equal(*pair, text)


def without_prefix(tokenizer):
    """As one that puts no space before a text."""
    made = json.loads(tokenizer.to_str())
    made["normalizer"] = made["normalizer"]["normalizers"][1]
    made["decoder"]["decoders"].pop()
    return Tokenizer.from_str(json.dumps(made))


def with_end(tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(
        "$A <|im_end|>", "$A $B <|im_end|>", [("<|im_end|>", 3)]
    )
    return tokenizer


@pytest.mark.parametrize("name", sorted(GGUF_PRE_TOKENIZER_SPLITS.keys() & PRE_TOKENIZERS.keys()))
def test_texts_are_split_as_by_transformers(name):
    assert find_pre_tokenizer(name).splits == (GGUF_PRE_TOKENIZER_SPLITS[name],)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_split_keeps_all_of_a_text(name):
    splits = [
        pre_tokenizers.Split(Regex(split), "isolated") for split in find_pre_tokenizer(name).splits
    ]
    for text in TRICKY:
        parts = pre_tokenizers.Sequence(splits).pre_tokenize_str(text)
        assert "".join(part for part, _ in parts) == text


@pytest.mark.parametrize("name", ["glm4", "glm5", "chatglm-bpe", "kimi-k2"])
def test_words_of_tiktoken_need_no_merges(name):
    pre = find_pre_tokenizer(name)
    assert pre.takes_whole_words and not pre.is_nfc


SPLITS = {  # tokenizer.ggml.pre, a text -> its parts
    "kimi-k2": (
        "the漢字Kanji'S 12345 a,\n",
        ["the", "漢字", "Kanji'S", " ", "123", "45", " a", ",\n"],
    ),
    "superbpe": ("by 1234567 and 12", ["by ", "1", "234", "567", " and ", "12"]),
    "deepseek-llm": (
        "Ab cd,e 漢字12\né ",
        ["Ab", " cd", ",", "e", " ", "漢字", "12", "\n", "é", " "],
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_text_is_split_into(name):
    text, want = SPLITS[name]
    splits = [
        pre_tokenizers.Split(Regex(split), "isolated") for split in find_pre_tokenizer(name).splits
    ]
    got = pre_tokenizers.Sequence(splits).pre_tokenize_str(text)
    assert [part for part, _ in got] == want


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("abAB 漢字々한カé\u0301ʰ19٣'sRE/,.\r\n\t🙂"), max_size=25))
def test_kimis_words_are_those_of_another_engine(text):
    """Its expression intersects sets of letters."""
    [split] = find_pre_tokenizer("kimi-k2").splits
    ours = pre_tokenizers.Split(Regex(split), "isolated").pre_tokenize_str(text)
    assert [part for part, _ in ours] == regex.findall(split, text, regex.V1)


def with_runs_of_spaces():
    """As Gemma's: tokens of several spaces, scores in another order than the merges."""
    made = json.loads(sentencepiece().to_str())
    vocab = made["model"]["vocab"]
    for token in ("▁▁", "▁▁▁", "▁▁▁▁"):
        vocab.setdefault(token, len(vocab))
    made["model"]["merges"] = []
    return Tokenizer.from_str(json.dumps(made))


def test_gemmas_merges_have_the_order_of_its_tokens(tmp_path):
    def edit(writer):
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        tokens[:] = [" " * len(t) if t.strip("▁") == "" and len(t) > 1 else t for t in tokens]
        random = Random(0)
        put_tokenizer(
            scores=([-random.random() for _ in tokens], GGUFValueType.ARRAY),
            add_space_prefix=NO,
            add_bos_token=NO,
        )(writer)

    text = with_runs_of_spaces().to_str()
    files = {"tokenizer.json": text, "tokenizer_config.json": "{}"}
    file = write(
        tmp_path, "gemma3", pre=None, files=files, edit=edit, vocab_size=600, **GEMMA3
    ).file
    architecture, read, _ = get_gguf_tokenizer(str(file))
    theirs, _ = convert_gguf_tokenizer(architecture, read)
    ours = open_source(file).tokenizer()
    for text in ["a    b  c   d▁▁e", *(text for text in TRICKY if "<" not in text)]:
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False).ids, text


def gemma4():
    """As Gemma 4's: no space before a text, and tokens of several line breaks."""
    made = json.loads(without_prefix(sentencepiece()).to_str())
    vocab, merges = made["model"]["vocab"], made["model"]["merges"]
    made["added_tokens"] = [t for t in made["added_tokens"] if t["content"] in vocab]
    for token in ("\n", "\n\n", "\n\n\n", "<turn|>"):
        vocab.setdefault(token, len(vocab))
    merges += [["\n", "\n"], ["\n\n", "\n"]]
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_special_tokens([AddedToken("<turn|>", normalized=False)])
    return with_added(tokenizer)


def as_gemma4(writer):
    """The file calls the end of a turn an ordinary token, and has no begin."""
    made = json.loads(gemma4().to_str())["model"]
    kinds = writer.kv_data[0]["tokenizer.ggml.token_type"].value
    kinds[made["vocab"]["<turn|>"]] = TokenKind.NORMAL
    put_tokenizer(
        model=("gemma4", GGUFValueType.STRING),
        merges=([" ".join(merge) for merge in made["merges"]], GGUFValueType.ARRAY),
        add_bos_token=NO,
        add_space_prefix=None,
        pre=None,
        scores=None,
    )(writer)


def test_gemma_4_has_a_tokenizer_of_its_own(tmp_path):
    files = model(tmp_path, None, gemma4(), as_gemma4)
    open_source(files.file).check()
    ours, theirs = (open_source(path).tokenizer() for path in files)
    for text in [*TRICKY, "a\n\n\n\n\nb <turn|>\n", "<turn|>"]:
        check_equal(ours, theirs, text)
    assert gemma4().token_to_id("<turn|>") in open_source(files.file).ends()["known text"]


def test_gemma_4_needs_merges(tmp_path):
    edit = put_tokenizer(model=("gemma4", GGUFValueType.STRING))
    file = model(tmp_path, None, gemma4(), edit).file
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.merges is missing"):
        open_source(file).tokenizer()


YES, NO = (True, GGUFValueType.BOOL), (False, GGUFValueType.BOOL)
NUMBER = GGUFValueType.UINT32
FLAGS = {  # tokenizer.ggml.pre, the tokenizer, what the file says of it
    "no space before a text": (
        None,
        lambda: without_prefix(sentencepiece()),
        put_tokenizer(add_space_prefix=NO),
    ),
    "ids of SentencePiece by default": (
        None,
        sentencepiece,
        put_tokenizer(bos_token_id=None, eos_token_id=None, add_bos_token=None),
    ),
    "a begin of Llama 3 by default": ("llama-bpe", llama_3, put_tokenizer(add_bos_token=None)),
    "a begin of Mistral by default": ("tekken", tekken, put_tokenizer(add_bos_token=None)),
    "no begin": ("llama-bpe", lambda: llama_3(adds_bos=False), put_tokenizer(add_bos_token=NO)),
    "an end behind every text": (
        None,
        lambda: with_end(sentencepiece()),
        put_tokenizer(add_bos_token=NO, add_eos_token=YES),
    ),
    "a padding that is no token": (
        None,
        sentencepiece,
        put_tokenizer(padding_token_id=(2**32 - 1, NUMBER)),
    ),
}


@pytest.mark.parametrize(("pre", "make", "edit"), FLAGS.values(), ids=FLAGS)
def test_what_a_file_says_of_its_tokenizer_is_done(tmp_path, pre, make, edit):
    files = model(tmp_path, pre, make(), edit)
    ours, theirs = (open_source(path).tokenizer() for path in files)
    for text in TRICKY:
        check_equal(ours, theirs, text)


def test_a_file_without_a_split_has_llama_cpps_default_and_a_warning(tmp_path, caplog):
    """`default` is llama.cpp's own; the other file names it."""
    sizes = {"vocab_size": 600, "eos_token_id": 3}
    edit = put_tokenizer(pre=None)
    nameless = write(tmp_path / "a", "llama", pre="default", edit=edit, **sizes).file
    named = write(tmp_path / "b", "llama", pre="default", **sizes).file
    for file in nameless, named:
        open_source(file).check()
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{nameless}: tokenizer.ggml.pre is missing, so the tokenizer splits")
    ours, theirs = (open_source(file).tokenizer() for file in (nameless, named))
    for text in [*TRICKY, "12345 is $5+5"]:
        assert ours.encode(text) == theirs.encode(text)


def merges_by_every_cut(ids, scores):
    """By definition; slow for long tokens."""
    found = [
        (scores[id], i, len(token) - i, token)
        for token, id in ids.items()
        for i in range(1, len(token))
        if token[:i] in ids and token[i:] in ids
    ]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(token[:i], token[i:]) for _, i, _, token in found]


def test_merges_are_those_of_every_cut():
    random = Random(0)
    for _ in range(50):
        texts = {"".join(random.choices("abc", k=random.randint(1, 7))) for _ in range(60)}
        ids = {text: id for id, text in enumerate(sorted(texts, key=lambda _: random.random()))}
        scores = [float(random.randint(-5, 0)) for _ in ids]
        assert merges_by_score(ids, scores) == merges_by_every_cut(ids, scores)


def test_a_token_of_a_megabyte_is_cut_only_where_parts_may_be_tokens():
    """At each place it would take minutes."""

    class Counted(str):
        cuts = 0

        def __getitem__(self, place):
            Counted.cuts += 1
            return str.__getitem__(self, place)

    long = Counted("ab" * 500_000)
    ids = {text: id for id, text in enumerate(("a", "b", long[1:], long))}
    Counted.cuts = 0
    assert merges_by_score(ids, [0.0] * 4) == [("a", long[1:])]
    assert Counted.cuts <= 8


def test_merges_win_over_scores(tmp_path):
    made = json.loads(sentencepiece().to_str())
    del made["model"]["merges"][20:]
    merges = [" ".join(merge) for merge in made["model"]["merges"]]
    edit = put_tokenizer(merges=(merges, GGUFValueType.ARRAY))
    files = model(tmp_path, None, Tokenizer.from_str(json.dumps(made)), edit)
    ours, theirs = (open_source(path).tokenizer() for path in files)
    for text in TRICKY:
        check_equal(ours, theirs, text)


def test_equal_scores_are_ordered_as_by_transformers():
    texts = ["a", "b", "c", "ab", "bc", "abc", "ca", "bca", "abca", "cab", "aa", "aaa"]
    vocab = {text: id for id, text in enumerate(texts)}
    scores = [-float(id // 4) for id in range(len(texts))]
    want = generate_merges(vocab, dict(zip(texts, scores, strict=True)))
    assert merges_by_score(vocab, scores) == want


def test_a_merge_may_begin_with_a_space(tmp_path):
    assert split_merge("  b") == (" ", "b")
    assert split_merge("a b") == ("a", "b")


@pytest.mark.parametrize(
    ("edit", "want"),
    [
        (put_tokenizer(), ["<|im_end|>", "</s>"]),
        (put_tokenizer(eos_token_id=(1, NUMBER)), ["<s>", "</s>", "<|im_end|>"]),
        (put_tokenizer(eot_token_id=(70, NUMBER)), ["<|im_end|>", 70, "</s>"]),
        (put_tokenizer(eom_token_id=(71, NUMBER)), ["<|im_end|>", 71, "</s>"]),
        (put_tokenizer(token_type=None), ["<|im_end|>"]),
        (put_tokenizer(token_type=None, eos_token_id=None), []),
    ],
)
def test_an_answer_ends_at_the_files_ends_and_at_control_tokens_that_are_called_so(
    tmp_path, edit, want
):
    file, _ = model(tmp_path, "gpt-2", gpt_2(), edit)
    source = open_source(file)
    ids = [token if isinstance(token, int) else source.vocabulary.ids[token] for token in want]
    assert [*find_end_tokens(source, source.tokenizer())] == ids


def vocabulary(*tokens, **ids):
    """A vocabulary of control tokens, and metadata."""
    metadata = {f"tokenizer.ggml.{key}": id for key, id in ids.items()}
    metadata["tokenizer.ggml.model"] = "gpt2"
    made = GgufVocabulary.__new__(GgufVocabulary)
    made.metadata, made.model, made.tokens = metadata, "gpt2", ["x", *tokens]
    made.kinds = [TokenKind.NORMAL] + [TokenKind.CONTROL] * len(tokens)
    made.ids = {token: id for id, token in enumerate(made.tokens)}
    return made


KEY = "eos_token"
KNOWN_ENDS = {  # control tokens, the eos -> ends by the place that names them
    "gemma": (("<bos>", "<eos>", "<end_of_turn>"), 2, {KEY: [2], "known text": [3]}),
    "command r": (("<|END_OF_TURN_TOKEN|>",), 1, {KEY: [1], "known text": [1]}),
    "gpt-oss ends messages": (
        ("<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"),
        1,
        {KEY: [1], "known text": [3, 4, 1]},
    ),
    "phi": (("<|end|>", "<|endoftext|>"), 2, {KEY: [2], "known text": [1, 2]}),
    "none": (("<|start|>",), None, {}),
}


@pytest.mark.parametrize(("tokens", "eos", "want"), KNOWN_ENDS.values(), ids=KNOWN_ENDS)
def test_control_tokens_of_known_texts_end_a_text(tokens, eos, want):
    assert vocabulary(*tokens, eos_token_id=eos).ends() == want


def test_an_added_token_of_a_known_text_ends_a_text_unless_it_is_html():
    made = vocabulary("<|im_end|>", "</s>")
    made.kinds = [TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.USER_DEFINED]
    assert made.ends() == {"known text": [1]}


def test_a_template_gets_the_named_tokens(tmp_path):
    file, _ = model(tmp_path, "gpt-2", gpt_2())
    variables = open_source(file).tokenizer().chat_template.variables
    assert variables == {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"}


def test_a_file_may_have_a_template_for_tools(tmp_path):
    def edit(writer):
        writer.add_string("tokenizer.chat_template.tool_use", "tools")

    template = open_source(write(tmp_path, edit=edit).file).tokenizer().chat_template
    assert template.tool_use == "tools" and template.source != "tools"


def without_template(writer):
    writer.kv_data[0].pop("tokenizer.chat_template")


def test_a_file_without_a_template_takes_the_one_in_its_folder(tmp_path):
    folder, outside = tmp_path / "model", tmp_path / "text"
    folder.mkdir()
    source = open_source(write(folder, edit=without_template).file)
    assert source.tokenizer().chat_template is None
    (folder / "chat_template.jinja").write_text("folder {{ eos_token }}")
    assert source.tokenizer().chat_template.render([{"role": "user"}]) == f"folder {EOS}"
    source.check()
    outside.write_text("x")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(outside)
    with pytest.raises(ConfigError, match="outside of the folder"):
        open_source(source.path).check()


def test_a_file_with_a_template_does_not_take_the_one_in_its_folder(tmp_path):
    """A folder may hold files of several models."""
    source = open_source(write(tmp_path).file)
    (tmp_path / "chat_template.jinja").write_text("folder")
    assert source.tokenizer().chat_template.source != "folder"


def test_a_named_file_replaces_any_template(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ eos_token }} own")
    for edit in (without_template, None):
        tokenizer = open_source(write(tmp_path / str(edit), edit=edit).file).tokenizer()
        template = tokenizer.templated(str(file)).chat_template
        assert template.render([{"role": "user"}]) == f"{EOS} own"
