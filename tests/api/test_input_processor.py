"""Token ids without an embedding are refused, whether a client, tokenizer or template made them."""

import numpy as np
import pytest

from specserve import LLM, SamplingParams, SpeculationParams
from specserve.api.input_processor import TextFiles, load_text_files, make_input_processor
from specserve.errors import PromptTooLong, RequestError
from specserve.text.chat_template import ChatTemplate
from specserve.text.defaults import GenerationDefaults
from tests.checkpoints import EOS, add_token_beyond, tiny_checkpoint

V, LENGTH = 320, 32
BEYOND = "<|320|>"
TOLD = rf"the token '<\|320\|>' has the id 320, .* \[0, {V}\)\)\. Omit the token"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("beyond"))
    assert add_token_beyond(folder) == BEYOND
    return folder


@pytest.fixture(scope="module")
def processor(folder):
    return make_input_processor(load_text_files(folder), V, LENGTH)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, set={"model.threads": 1, "memory.kv_bytes": 1 << 26}, progress=False) as llm:
        yield llm


@pytest.mark.parametrize("prompt", [f"the {BEYOND} cat", [1, V, 2], np.array([1, V])])
def test_a_token_that_the_model_has_no_embedding_of_is_refused(processor, prompt):
    with pytest.raises(RequestError, match=TOLD):
        processor.read(prompt)


def test_a_template_that_writes_such_a_token_is_refused(processor, monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}" + BEYOND, {})
    monkeypatch.setattr(processor.tokenizer, "chat_template", template)
    with pytest.raises(RequestError, match=TOLD):
        processor.render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("token", [-1, V + 1, 2**31, 2**64, -(2**70)])
def test_an_id_that_is_no_token_is_refused_by_its_number(processor, token):
    for ask in (
        lambda: processor.read([1, token]),
        lambda: processor.resolve(SamplingParams(stop_token_ids=(1, token))),
        lambda: processor.resolve(SamplingParams(allowed_token_ids=(1, token))),
    ):
        with pytest.raises(RequestError, match=rf"{token} is not a token id\. .* \[0, {V}\)"):
            ask()


@pytest.mark.parametrize(
    ("param", "value", "field"),
    [
        ("stop_token_ids", (V,), "stop_token_ids"),
        ("allowed_token_ids", (V,), "allowed_token_ids"),
        ("logit_bias", {V: 1}, "logit_bias"),
        ("bad_words", ("the", BEYOND), r"bad_words\[1\]"),
    ],
)
def test_ids_of_parameters_are_held_to_the_same(processor, param, value, field):
    with pytest.raises(RequestError, match=f"{field}: {TOLD}") as e:
        processor.resolve(SamplingParams(**{param: value}))
    assert e.value.param.startswith(param)


def test_the_last_id_of_the_model_is_one(processor):
    assert processor.read([0, V - 1]) == [0, V - 1]


def test_an_end_that_the_model_cannot_say_is_left_out(processor):
    end = processor.tokenizer.get_vocab()[EOS]
    assert processor.resolve(SamplingParams()).stop_ids == {end}


def test_a_prompt_that_spells_such_a_token_costs_no_other_stream_anything(llm):
    params = SamplingParams(max_tokens=12, seed=3)
    want = llm.generate("the cat", params)[0].token_ids
    stream = llm.stream("the cat", params)
    said = list(next(stream)[1])
    for prompt in (f"the {BEYOND}", [V]):
        with pytest.raises(RequestError, match=TOLD):
            llm.generate(prompt)
    with pytest.raises(RequestError, match=TOLD):
        llm.chat([{"role": "user", "content": BEYOND}])
    for _, token_ids in stream:
        said += token_ids
    assert said == want


class Counting:
    """Wraps a tokenizer, and notes what it is asked."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def encode(self, text, add_special_tokens=True):
        self.asked.append(text)
        return self.tokenizer.encode(text, add_special_tokens)


def test_prompts_after_the_first_that_is_too_long_are_not_tokenized(llm, monkeypatch):
    tokenizer = Counting(llm.tokenizer)
    files = TextFiles(tokenizer, llm.input_processor.defaults)
    processor = make_input_processor(files, V, LENGTH)
    monkeypatch.setattr(llm, "input_processor", processor)
    with pytest.raises(PromptTooLong):
        llm.generate(["the cat", "x" * 40, "later", "still later"])
    assert tokenizer.asked == ["the cat", "x" * 40]


def test_wrong_parameters_are_refused_before_anything_is_tokenized(llm, monkeypatch):
    tokenizer = Counting(llm.tokenizer)
    files = TextFiles(tokenizer, llm.input_processor.defaults)
    processor = make_input_processor(files, V, LENGTH)
    monkeypatch.setattr(llm, "input_processor", processor)
    with pytest.raises(RequestError, match="temperature"):
        llm.generate("the cat", SamplingParams(temperature=-1))
    assert tokenizer.asked == []


def kept(processor, prompt, truncate, **params):
    asked = SamplingParams(truncate_prompt_tokens=truncate, **params)
    return processor.read(prompt, processor.num_kept(asked))


@pytest.mark.parametrize("size", [5, 31, 40, 3 * LENGTH * 16])
@pytest.mark.parametrize("truncate", [1, 5, 31])
def test_the_last_tokens_are_kept_of_ids_and_of_text_of_any_length(processor, size, truncate):
    text = ("the cat sat on the mat, " * size)[:size]
    ids = processor.tokenizer.encode(text)
    for prompt in (text, ids):
        assert kept(processor, prompt, truncate) == ids[-truncate:]


def test_of_a_text_far_too_long_only_the_end_is_tokenized(processor):
    tokenizer = Counting(processor.tokenizer)
    files = TextFiles(tokenizer, processor.defaults)
    text = "the cat sat on the mat, " * 100_000
    want = kept(processor, text, 9)
    assert kept(make_input_processor(files, V, LENGTH), text, 9) == want
    assert sum(map(len, tokenizer.asked)) < 100 * LENGTH
    assert want == processor.tokenizer.encode(text)[-9:]


def test_as_much_of_the_end_is_tokenized_as_has_the_tokens(processor):
    class Words:
        """Its tokens have a hundred characters each."""

        def encode(self, text, add_special_tokens=True):
            return [int(word) % V for word in text.split()]

    files = TextFiles(Words(), processor.defaults)
    text = " ".join(f"{i:0100}" for i in range(1000))
    want = [i % V for i in range(1000)][-31:]
    assert kept(make_input_processor(files, V, LENGTH), text, 31) == want


def test_what_fits_is_the_context_without_the_answers_tokens(processor):
    ids = [*range(100)]
    assert kept(processor, ids, -1) == ids[-31:]
    assert kept(processor, ids, -1, max_tokens=20) == ids[-12:]
    assert kept(processor, ids[:5], -1, max_tokens=20) == ids[:5]
    assert kept(processor, ids[:5], None) == ids[:5]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": LENGTH}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1, "max_tokens": LENGTH}, "max_tokens"),
    ],
    ids=str,
)
def test_a_length_that_no_prompt_can_be_cut_to_is_refused_by_name(processor, params, param):
    with pytest.raises(RequestError, match=param) as e:
        processor.resolve(SamplingParams(**params))
    assert e.value.param == param


@pytest.mark.parametrize(
    ("sources", "words"),
    [(("ngram", "model"), r"'suffix' \(known: ngram, model"), ((), r"'ngram' \(known: none")],
)
def test_a_source_that_the_engine_lacks_is_refused_with_those_it_has(folder, sources, words):
    processor = make_input_processor(load_text_files(folder), V, LENGTH, sources)
    asked = SamplingParams(speculation=SpeculationParams(sources=("ngram", "suffix")))
    with pytest.raises(RequestError, match=words) as e:
        processor.resolve(asked)
    assert e.value.param == "speculation.sources"
    for names in (sources, (), None):
        processor.resolve(SamplingParams(speculation=SpeculationParams(sources=names)))


def test_a_source_by_another_engines_name_is_refused_with_the_one_it_has_here(folder):
    processor = make_input_processor(load_text_files(folder), V, LENGTH, ("ngram", "eagle"))
    asked = SamplingParams(speculation=SpeculationParams(sources=("eagle3",)))
    with pytest.raises(RequestError, match=r"'eagle3': use 'eagle' for .* heads \(known: ngram"):
        processor.resolve(asked)


class Letters:
    """A token for each letter; what follows a space is another token, but a digit is two."""

    def encode(self, text, add_special_tokens=True):
        bare = text.lstrip()
        ids = [ord(letter) for letter in bare]
        if bare == text or not ids:
            return ids
        return [32, *ids] if bare[0] < "a" else [ids[0] + 100, *ids[1:]]

    def id_to_token(self, token):
        return None


def letters(vocab_size=V):
    return make_input_processor(TextFiles(Letters(), GenerationDefaults()), vocab_size, LENGTH)


BAD_WORDS = {  # as given -> tokens
    "at the beginning and after a space": ("ab", [(97, 98), (197, 98)]),
    "with a space before it": (" \n ab", [(97, 98), (197, 98)]),
    "of as many tokens after a space as not": ("1", [(49,)]),
    "as it is written": (" 1", [(49,), (32, 49)]),
}


@pytest.mark.parametrize(("word", "tokens"), BAD_WORDS.values(), ids=BAD_WORDS)
def test_a_bad_word_is_ruled_out(word, tokens):
    asked = SamplingParams(bad_words=["z", word])
    assert letters().resolve(asked).bad_words == ((122,), (222,), *tokens)


def test_a_bad_word_of_the_models_tokenizer_is_ruled_out_in_both_forms(processor):
    encode = processor.tokenizer.encode
    plain, spaced = (tuple(encode(text, add_special_tokens=False)) for text in ("cat", " cat"))
    assert plain[0] != spaced[0] and len(plain) == len(spaced)
    assert processor.resolve(SamplingParams(bad_words=(" cat",))).bad_words == (plain, spaced)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a", " "], r"bad_words\[1\]: ' ' has 0 tokens\. Use a bad word of 1 to 64"),
        (["a" * 65], r"bad_words\[0\]: 'a+ has 65 tokens"),
        (["\ud800"], r"bad_words\[0\] is not valid text"),
    ],
)
def test_a_bad_word_of_no_tokens_or_too_many_is_refused_by_name(processor, words, told):
    processor = processor if words == ["\ud800"] else letters()
    with pytest.raises(RequestError, match=told) as e:
        processor.resolve(SamplingParams(bad_words=words))
    assert e.value.param.startswith("bad_words[")


def test_the_same_bad_words_are_tokenized_once_and_others_anew(processor):
    tokenizer = Counting(processor.tokenizer)
    counted = make_input_processor(TextFiles(tokenizer, processor.defaults), V, LENGTH)
    asked = [SamplingParams(bad_words=words) for words in (["cat"], ["cat"], ["dog"], ["cat"])]
    assert [counted.resolve(a).bad_words for a in asked] == [
        processor.resolve(a).bad_words for a in asked
    ]
    assert tokenizer.asked == ["cat", " cat", "dog", " dog", "cat", " cat"]


@pytest.mark.parametrize("word", ["\n", "      ", " \n the", "  cat"])
def test_spaces_of_a_bad_word_are_part_of_it(processor, word):
    written = tuple(processor.tokenizer.encode(word, add_special_tokens=False))
    others = SamplingParams(bad_words=[word.strip()] if word.strip() else [])
    told = processor.resolve(SamplingParams(bad_words=(word,))).bad_words
    assert told == (*processor.resolve(others).bad_words, written)


def test_parameters_of_several_prompts_are_those_of_each(processor):
    for asked in (SamplingParams(seed=1), SamplingParams(seed=2, max_tokens=20, bad_words=("a",))):
        for sizes in ((3, 20, 7), (20, 3)):
            each = [processor.resolve(asked, size) for size in sizes]
            assert processor.for_prompts(processor.resolve(asked), asked.own_seed, sizes) == each
    resolved = processor.resolve(SamplingParams())
    seeds = {sampling.seed for sampling in processor.for_prompts(resolved, None, [1] * 9)}
    assert len(seeds) == 9, "drawn for each"


A, B, END = ord("a"), ord("b"), ord("e")
LEFT = {  # parameters -> whether a token is left to draw after every text
    "all allowed are bad": ({"allowed_token_ids": (A, A), "bad_words": ["a"]}, False),
    "one allowed is not bad": ({"allowed_token_ids": (A, B), "bad_words": ["a"]}, True),
    "each is bad after one": ({"allowed_token_ids": (A, B), "bad_words": ["aa", "ab"]}, False),
    "one is bad after each": ({"allowed_token_ids": (A, B), "bad_words": ["aa", "bb"]}, True),
    "by words of different lengths": (
        {"allowed_token_ids": (A, B), "bad_words": ["b", "aaa"]},
        False,
    ),
    "after what cannot be said": (
        {"allowed_token_ids": (A, B), "bad_words": ["za", "zb", "aza", "azb"]},
        True,
    ),
    "only an end, too early": (
        {"allowed_token_ids": (END,), "stop_token_ids": (END,), "min_tokens": 1},
        False,
    ),
    "only an end": ({"allowed_token_ids": (END,), "stop_token_ids": (END,)}, True),
    "an end where it may come": (
        {
            "allowed_token_ids": (A, END),
            "stop_token_ids": (END,),
            "bad_words": ["aa"],
            "min_tokens": 1,
        },
        True,
    ),
    "an end where it may not": (
        {
            "allowed_token_ids": (A, END),
            "stop_token_ids": (END,),
            "bad_words": ["aa"],
            "min_tokens": 2,
        },
        False,
    ),
    "after an end nothing comes": (
        {"allowed_token_ids": (A, END), "stop_token_ids": (END,), "bad_words": ["ea", "ee"]},
        True,
    ),
}


@pytest.mark.parametrize(("asked", "is_left"), LEFT.values(), ids=LEFT)
def test_parameters_that_leave_nothing_to_draw_are_refused(asked, is_left):
    params = SamplingParams(**asked)
    if is_left:
        letters().resolve(params)
        return
    sent = " and ".join(name for name in ("bad_words", "min_tokens") if name in asked)
    with pytest.raises(RequestError, match=f": {sent} could leave no token to sample") as e:
        letters().resolve(params)
    assert e.value.param == "allowed_token_ids"


def test_a_whole_vocabulary_may_be_bad():
    with pytest.raises(RequestError, match=r"bad_words: .* no token to sample"):
        letters(3).resolve(SamplingParams(bad_words=["\0", "\1", "\2"]))
    letters(4).resolve(SamplingParams(bad_words=["\0", "\1", "\2"]))
