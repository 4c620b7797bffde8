"""Checks docs/tour.md: its record, its pictures and its numbers."""

import json
import re
from itertools import accumulate
from pathlib import Path

import msgspec
import pytest

from specserve import LLM
from specserve_bench import tour, tour_record
from specserve_drafters import Draft
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tour.md").read_text()
KEPT = msgspec.json.decode((ROOT / "bench/results/tour.json").read_bytes(), type=tour_record.Tour)
CODE = r"```.*?```|`[^`]*`|\]\([^)]*\)"


def test_the_page_shows_the_numbers_of_the_record():
    prose = re.sub(CODE, "", PAGE, flags=re.DOTALL).replace("Qwen3-0.6B", "")
    assert re.findall(r"\*\*([\d.]+)\*\*", prose) == tour_record.numbers(KEPT)
    assert not re.search(r"\d", re.sub(r"\*\*[\d.]+\*\*", "", prose)), "a number is not in bold"


def test_the_page_shows_the_request_and_the_response_of_the_record():
    step = KEPT.drafted.steps[KEPT.shown]
    assert json.loads(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1]) == KEPT.body
    assert f"```text\n{KEPT.drafted.text}\n```" in PAGE
    assert f'"content": {json.dumps(step.text)}' in PAGE
    rejected = next(n for k, n in enumerate(step.nodes, 1) if k not in step.accepted)
    accepted = next(
        step.nodes[k - 1] for k in step.accepted if step.nodes[k - 1].parent == rejected.parent
    )
    assert f"ranked `{rejected.text}` first. The target model chose `{accepted.text}`" in PAGE
    assert f"first token of the response, `{KEPT.drafted.steps[0].text}`" in PAGE
    assert f"The bonus token is `{step.texts[-1]}`" in PAGE
    assert KEPT.shown == len(KEPT.drafted.steps) - 1, "its bonus token has to end the response"


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", svg.read_text())


def test_the_kept_pictures_are_drawn_from_the_record(tmp_path):
    for drawn in tour.draw(KEPT, tmp_path):
        kept = ROOT / "docs/pictures" / drawn.name
        assert len(texts(kept)) > 5 and texts(drawn) == texts(kept)
        assert kept.stat().st_size < 60_000
        assert kept.name == "architecture.svg" or f"](pictures/{kept.name})" in PAGE


def check(made: tour_record.Tour) -> None:
    """Every step's accepted path gives its tokens, and the steps give the text."""
    assert made.sampled[0] == made.sampled[1]
    assert made.plain.token_ids == made.drafted.token_ids
    for run in (made.drafted, made.plain):
        assert [t for step in run.steps for t in step.tokens] == run.token_ids
        assert "".join(step.text for step in run.steps) == run.text
    for step in made.drafted.steps:
        at = 0
        for node, token in zip(step.accepted, step.tokens, strict=False):
            draft = step.nodes[node - 1]
            assert (draft.parent, draft.token) == (at, token)
            at = node
        wanted = step.tokens[len(step.accepted)]
        assert all(n.token != wanted for n in step.nodes if n.parent == at)
        if step.plan is not None:
            size = len(step.nodes)
            assert sorted((n.p for n in step.nodes), reverse=True) == step.candidates[:size]
            expected = [*accumulate(step.candidates, initial=0.0)][size]
            assert step.plan.tokens == pytest.approx(1 + step.plan.kept * expected, abs=0.01)
    assert 0 < made.num_cached < len(made.prompt)


def test_the_kept_record_is_consistent():
    check(KEPT)
    step = KEPT.drafted.steps[KEPT.shown]
    assert (
        tour_record.rates(step)[len(step.nodes)]
        == max(tour_record.rates(step))
        > tour_record.rates(step)[-1]
    )
    assert step.plan.seconds == pytest.approx(
        (step.draft_ms + tour_record.cost(step, step.plan.rows)) / 1e3, rel=0.01
    )


def test_a_run_on_a_tiny_model_is_recorded_and_drawn(monkeypatch, tmp_path):
    Clock(monkeypatch, target=lambda rows: 0.02)  # slow enough for a draft model to pay
    model = tiny_checkpoint(tmp_path / "model")
    with LLM(model, model, progress=False, set={"memory.kv_bytes": 1 << 22}) as llm:
        made = tour_record.record(
            llm, ["the cat sat on the mat", "the cat"], ["a mat"], max_tokens=24
        )
    check(made)
    assert made.drafted.steps[made.shown].accepted
    again = msgspec.json.decode(msgspec.json.encode(made), type=tour_record.Tour)
    assert again == made and len(tour_record.numbers(made)) == len(tour_record.numbers(KEPT))
    tour.draw(made, tmp_path / "pictures")
    shown = tmp_path / "pictures/tour-tree.svg"
    assert any("bonus" in text for text in texts(shown))


def test_the_mask_that_is_drawn_is_that_of_the_pass():
    nodes = KEPT.drafted.steps[KEPT.shown].nodes
    masks = Draft([n.token for n in nodes], [n.parent for n in nodes]).masks()
    assert [sum(1 << n for n in seen) for seen in tour.seen(nodes)] == masks
