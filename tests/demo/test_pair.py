"""The demo pair, and the figures of its card."""

import json
import math

import pytest
import torch

from specserve import LLM, SamplingParams
from specserve.config import DEMO, DEMO_DRAFT, DEMO_TARGET
from specserve_bench.demo import evaluate
from specserve_bench.demo.card import TEXT, read_card, words
from specserve_bench.demo.held_out import Question, questions
from specserve_bench.local import Local
from specserve_bench.results import Load
from specserve_bench.workloads import workload
from tests.engine.clock import Clock

SETTINGS = {"memory.kv_bytes": 1 << 27}


@pytest.fixture(scope="module")
def llm():
    with LLM(set=SETTINGS, progress=False) as llm:
        yield llm


def test_without_a_model_the_pair_is_there(llm, monkeypatch):
    Clock(monkeypatch)
    assert (llm.config.target, llm.config.draft) == (str(DEMO_TARGET), str(DEMO_DRAFT))
    assert llm.loaded.drafter == "auto" and llm.loaded.engine.sources == (
        "ngram",
        "model",
        "grammar",
        "prediction",
    )
    question = [{"role": "user", "content": "What does shutil.copytree do?"}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=64))
    assert output.finish_reason == "stop" and output.text
    assert output.speculation.accepted > 0


def test_the_files_are_small_enough_for_a_repository():
    sizes = [file.stat().st_size for file in DEMO.rglob("*") if file.is_file()]
    assert sum(sizes) <= 45e6 and max(sizes) < 15e6


def test_the_pair_is_what_was_asked_of_it():
    """Floors of a pair that two cores have trained."""
    figures = read_card().figures
    assert figures.right_first_sentences >= 0.6
    assert min(figures.acceptance_on_questions, figures.acceptance_on_completion) >= 3
    assert figures.acceptance_alone_on_completion >= 2.5
    assert figures.draft_cost <= 1 / 3  # a tenth of the weights, but as many barriers a layer
    for folder, num_layers in ((DEMO_TARGET, 4), (DEMO_DRAFT, 1)):
        fields = json.loads((folder / "config.json").read_text())
        assert (fields["model_type"], fields["dtype"]) == ("qwen3", "bfloat16")
        assert fields["num_hidden_layers"] == num_layers
        assert fields["num_key_value_heads"] == fields["num_attention_heads"]
        assert fields["max_position_embeddings"] == 8192


def test_in_random_text_there_is_nothing_to_draft_by_but_the_samplers_own_noise(llm):
    asked = workload("random", 4, seed=0)
    lengths = {}
    for drafter in ("ngram", "model"):
        with LLM(drafter=drafter, set=SETTINGS, progress=False, weights=llm.weights) as fixed:
            speculation = Local(fixed).run(asked, Load(concurrency=4)).speculation
            lengths[drafter] = speculation.acceptance_length
    assert lengths["ngram"] < 1.1 < lengths["model"]


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


# Where a processor has it, unlike the card's, sums of bfloat16 products are rounded otherwise.
WITH_AMX = {"acceptance_on_completion": 5.237}


@pytest.mark.slow
def test_one_command_measures_the_figures_of_the_card_again(capsys):
    assert evaluate.main([]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    figures = {name: (float(value), float(card[:-1])) for name, value, _, card in lines}
    assert figures.keys() == set(type(read_card().figures).__struct_fields__)
    there = WITH_AMX if torch.cpu.get_capabilities().get("amx_bf16") else {}
    for name, (value, card) in figures.items():
        want = there.get(name, card)
        # Seconds are this machine's; words differ by rounding between kinds of processors.
        assert value == pytest.approx(want, rel=0.5 if name == "draft_cost" else 0.02), name


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
