"""Token ids without an embedding are refused, whether a client, tokenizer or template made them."""

import numpy as np
import pytest

from specserve import LLM, SamplingParams, SpeculationParams
from specserve.errors import PromptTooLong, RequestError
from specserve.input_processor import TextFiles, load_text_files, make_input_processor
from specserve.models.chat_template import ChatTemplate
from tests.checkpoints import EOS, add_token_beyond, tiny_checkpoint

V, LENGTH = 320, 32
BEYOND = "<|320|>"
TOLD = rf"the token '<\|320\|>' has the id 320, .* \[0, {V}\): leave it out, or serve a model"


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
    ):
        with pytest.raises(RequestError, match=rf"{token} is no token id: ids lie in \[0, {V}\)"):
            ask()


def test_a_stop_token_is_held_to_the_same(processor):
    with pytest.raises(RequestError, match=f"stop_token_ids: {TOLD}") as e:
        processor.resolve(SamplingParams(stop_token_ids=(V,)))
    assert e.value.param == "stop_token_ids"


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
    [(("ngram", "model"), "'suffix' .* there are ngram, model"), ((), "'ngram' .* none, as")],
)
def test_a_source_that_the_engine_lacks_is_refused_with_those_it_has(folder, sources, words):
    processor = make_input_processor(load_text_files(folder), V, LENGTH, sources)
    asked = SamplingParams(speculation=SpeculationParams(sources=("ngram", "suffix")))
    with pytest.raises(RequestError, match=words) as e:
        processor.resolve(asked)
    assert e.value.param == "speculation.sources"
    for names in (sources, (), None):
        processor.resolve(SamplingParams(speculation=SpeculationParams(sources=names)))
