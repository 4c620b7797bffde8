"""The pair that comes with specserve, and what its card says of it."""

import math

import pytest

from specserve import LLM, SamplingParams
from specserve.config import DEMO, DEMO_DRAFT, DEMO_TARGET
from specserve.demo import evaluate
from specserve.demo.card import TEXT, read_card, words
from specserve.demo.evaluation import Question, questions

SETTINGS = {"memory.kv_bytes": 1 << 27}


@pytest.fixture(scope="module")
def llm():
    with LLM(set=SETTINGS, progress=False) as llm:
        yield llm


def test_without_a_model_the_pair_is_there(llm):
    assert (llm.config.target, llm.config.draft) == (str(DEMO_TARGET), str(DEMO_DRAFT))
    assert llm.loaded.drafter == "model"
    question = [{"role": "user", "content": "What does shutil.copytree do?"}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=64))
    assert output.finish_reason == "stop" and output.text
    assert output.speculation.accepted > 0


def test_the_files_are_small_enough_for_a_repository():
    sizes = [file.stat().st_size for file in DEMO.rglob("*") if file.is_file()]
    assert sum(sizes) <= 45e6 and max(sizes) < 15e6


def test_the_card_in_words_is_the_card(llm):
    assert (DEMO / TEXT).read_text() == words(read_card())


def test_the_share_of_right_answers_is_that_of_the_card(llm):
    asked = questions()[::40]
    right = [
        evaluate.is_right(output.text, question)
        for output, question in zip(evaluate.ask(llm, asked), asked, strict=True)
    ]
    told = read_card().figures.right_first_sentences
    chance = math.sqrt(told * (1 - told) / len(asked))
    assert sum(right) / len(right) == pytest.approx(told, abs=3 * chance)


@pytest.mark.slow
def test_one_command_measures_the_figures_of_the_card_again(capsys):
    assert evaluate.main([]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    figures = {name: (float(value), float(card[:-1])) for name, value, _, card in lines}
    assert figures.keys() == set(type(read_card().figures).__struct_fields__)
    for name, (value, card) in figures.items():
        # Seconds are this machine's; words differ by rounding between kinds of processors.
        assert value == pytest.approx(card, rel=0.5 if name == "draft_cost" else 0.02), name


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("Copy it. All of it.", True),
        ("Copy it.", True),
        ("Copy it.\n\nMore", True),
        ("Copy it.x", False),
        ("Copy it", False),
        ("To copy it. Copy it.", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_its_first_sentence_is_the_docstrings(answer, is_right):
    assert evaluate.is_right(answer, Question("f", "What?", "Copy it.")) == is_right
