"""What tables and plots show, of a result that was written by hand."""

import msgspec
import pytest

from specserve_bench import plots
from specserve_bench.report import report
from specserve_bench.results import (
    Load,
    MeasuredRequest,
    Result,
    Round,
    Run,
    Speculation,
    Spread,
    Subject,
)

QUESTIONS = Load(concurrency=1)


def a_round(seconds, ends, speculation=None):
    """Requests of five tokens, due at once; each ends one second after its first token."""
    answers = [
        MeasuredRequest(
            number=n, arrived_at=0.0, first_at=end - 1, last_at=end, completion_tokens=5
        )
        for n, end in enumerate(ends)
    ]
    gaps = Spread(mean=10.0, p50=20.0, p90=30.0, p99=40.0)
    return Round(
        seconds=seconds,
        requests=answers,
        itl_ms=gaps,
        output_hash="same",
        speculation=speculation,
        draft_seconds=0.25,
        verify_seconds=1.5,
        step_seconds=2.0,
    )


@pytest.fixture
def result():
    guessed = Speculation(steps=10, tokens=25, drafted=30, accepted=[2, 1, 7])
    rounds = {
        "off": [a_round(4.0, [2.0, 4.0])],
        "ngram:4": [a_round(2.0, [1.5, 2.0], guessed)],
    }
    subjects = {
        "off": Subject(model="m", drafter="none"),
        "ngram:4": Subject(model="m", drafter="ngram", max_nodes=4),
    }
    return Result(
        kind="drafters",
        machine={"cpu": "one"},
        subjects=subjects,
        workloads={"questions": {"about": "asks"}},
        runs=[
            Run(subject=name, workload="questions", load=QUESTIONS, rounds=rounds[name])
            for name in subjects
        ],
    )


def rows_of(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_every_figure_stands_under_its_name(result):
    shown = rows_of(report(result))
    assert "TTFT x base TPOT x base tokens/s goodput/s errors outputs" in shown
    assert "off 2000.00 1.00 (1.00-1.00) 250.00 1.00 (1.00-1.00) 2.5 0.00 0 same" in shown
    assert "ngram:4 750.00 0.38 (0.38-0.38) 250.00 1.00 (1.00-1.00) 5.0 0.00 0 same" in shown
    assert "tokens a step reach depth 1, 2, ... wasted rows draft s verify s other s" in shown
    assert "off - - - 0.25 1.50 0.25" in shown
    assert "ngram:4 2.50 0.80 0.70 38% 0.25 1.50 0.25" in shown
    assert "mean p50 p90 p99" in shown
    at = shown.index("off TTFT 2000.00 2000.00 2800.00 2980.00")
    assert shown[at + 1 : at + 5] == [
        "TPOT 250.00 250.00 250.00 250.00",
        "ITL 10.00 20.00 30.00 40.00",
        "longest stall - - - -",
        "end to end 3000.00 3000.00 3800.00 3980.00",
    ]


def test_ratios_of_several_rounds_have_an_interval(result):
    for run, seconds in zip(result.runs, ([2.0, 2.0], [2.0, 1.0]), strict=True):
        run.rounds = [a_round(2.0, [1 + s, 1 + s]) for s in seconds]
    [row] = [row for row in rows_of(report(result)) if row.startswith("ngram:4 1500.00")]
    # Ratios 1 and 1/2: logarithms 0 and -0.69, t = 12.706 with one degree.
    assert row.split("250.00")[0].split() == [
        "ngram:4",
        "1500.00",
        "0.75",
        "(0.50-1.00)",
        "[0.01-57.80]",
    ]


def test_what_was_learnt_before_a_round_is_told(result):
    assert "at most 4 nodes\n" in report(result)
    result.subjects["ngram:4"] = msgspec.structs.replace(result.subjects["ngram:4"], is_warm=True)
    assert "at most 4 nodes, warm\n" in report(result)


def test_plots_draw_the_figures(result):
    [cdf] = plots.latency_cdf([result]).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in cdf.lines}
    assert drawn["off"] == [[2000.0, 0.5], [4000.0, 1.0]]
    assert drawn["ngram:4"] == [[1500.0, 0.5], [2000.0, 1.0]]
    [depths] = plots.acceptance_by_depth([result]).axes
    assert [line.get_xydata().tolist() for line in depths.lines] == [[[1.0, 0.8], [2.0, 0.7]]]
    [ratios] = plots.tpot_ratios([result]).axes
    assert [bar.get_height() for bar in ratios.patches] == [1.0, 1.0]
    assert "2.50" in [text.get_text() for text in ratios.texts]


def test_tpot_over_concurrency_is_a_curve_of_means(result):
    busier = Load(concurrency=4)
    result.runs += [
        Run(subject=run.subject, workload="questions", load=busier, rounds=run.rounds)
        for run in result.runs
    ]
    [curve] = plots.tpot_over_concurrency([result]).axes
    points = [line.get_xydata().tolist() for line in curve.lines]
    assert points == [[[1.0, 250.0], [4.0, 250.0]]] * 2
