"""What tables and plots show, of a result that was written by hand."""

import msgspec
import pytest
from matplotlib.colors import to_hex

from specserve_bench import plots
from specserve_bench.report import markdown, report
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
    assert (
        "subject TTFT x base by round TPOT x base by round tokens/s goodput/s errors outputs"
        in shown
    )
    assert "off 2000.00 1.00 (1.00-1.00) 250.00 1.00 (1.00-1.00) 2.5 0.00 0 same" in shown
    assert "ngram:4 750.00 0.38 (0.38-0.38) 250.00 1.00 (1.00-1.00) 5.0 0.00 0 same" in shown
    assert (
        "subject tokens a step reach depth 1, 2, ... wasted rows draft s verify s other s" in shown
    )
    assert "off - - - 0.25 1.50 0.25" in shown
    assert "ngram:4 2.50 0.80 0.70 38% 0.25 1.50 0.25" in shown
    assert "subject time mean p50 p90 p99" in shown
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


def test_every_table_has_a_title_that_says_what_it_shows(result):
    where = "questions, 1 at a time: "
    titles = [row.removeprefix(where) for row in rows_of(report(result)) if row.startswith(where)]
    assert titles == [
        "latency and throughput, base off",
        "speculation of each subject",
        "times of each subject in milliseconds",
    ]


def test_printed_ratios_divide_out_of_the_printed_medians(result):
    # The rounds' own ratios are 3, 0.5 and 0.75, the medians 1000 and 750.
    for run, seconds in zip(result.runs, ([1, 4, 4], [3, 2, 3]), strict=True):
        run.rounds = [slowed(a_round(4.0, [2.0]), s) for s in seconds]
    assert markdown([result]).splitlines()[2:] == [
        "| off | 1000.00 (1.00), - |",
        "| ngram:4 | 750.00 (0.75), - |",
    ]
    [row] = [row for row in rows_of(report(result)) if row.startswith("ngram:4 1000.00")]
    assert " 750.00 0.75 (0.50-3.00) [" in row


def slowed(round, seconds):
    """Each request takes so many seconds after its first token, for four more tokens."""
    for answer in round.requests:
        answer.last_at = answer.first_at + seconds
    return round


def test_results_of_several_machines_say_which(result):
    other = msgspec.structs.replace(result, machine={"cpu": "two", "cores": 8})
    assert " on " not in markdown([result, result]).splitlines()[0]
    head = markdown([result, other]).splitlines()[0]
    assert "m on one: questions" in head and "m on two, 8 cores: questions" in head
    titles = [ax.get_title() for ax in plots.latency_cdf([result, other]).axes]
    assert titles[1] == "m on two, 8 cores\nquestions, 1 at a time"


def test_a_subject_looks_the_same_in_every_panel_and_plot(result):
    busier = Load(concurrency=4)
    for run in list(result.runs):
        result.runs.append(
            Run(subject=run.subject, workload="questions", load=busier, rounds=run.rounds)
        )
    alone = msgspec.structs.replace(
        result,
        subjects={"ngram:4": result.subjects["ngram:4"]},
        runs=[run for run in result.runs if run.subject == "ngram:4"],
    )
    looks = set()
    for name in ("latency-cdf", "tpot-over-concurrency", "acceptance-by-depth"):
        figure = plots.PLOTS[name]([result, alone])
        lines = [line for ax in figure.axes for line in ax.lines if line.get_label() == "ngram:4"]
        looks |= {(line.get_color(), line.get_marker()) for line in lines}
    bars = [ax.patches[1] for ax in plots.tpot_ratios([result, alone]).axes]
    assert looks == {(plots.COLORS[1], plots.MARKERS[1])}
    assert {(to_hex(b.get_facecolor()).upper(), b.get_hatch()) for b in bars} == {
        (plots.COLORS[1], plots.HATCHES[1])
    }


def test_subjects_beyond_the_colors_differ_in_marker_and_hatch(result):
    result.subjects = {str(n): Subject(model="m") for n in range(72)}
    looks = plots.styles([result]).values()
    assert len({look[:2] for look in looks}) == len({look[::2] for look in looks}) == 72


def test_the_legend_is_outside_and_axes_say_what_is_better(result):
    for name in ("latency-cdf", "acceptance-by-depth", "tpot-ratios"):
        figure = plots.PLOTS[name]([result])
        assert all(ax.get_legend() is None for ax in figure.axes)
        assert len(figure.legends) == (name != "tpot-ratios"), "bars have their names below them"
        [ax] = figure.axes
        assert "er is better)" in ax.get_xlabel() + ax.get_ylabel()
    assert "paired" in ax.get_ylabel() and "ratio to off" in ax.get_ylabel()


def test_what_was_learnt_before_a_round_is_reported(result):
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
