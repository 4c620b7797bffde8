"""The arithmetic of the suite, on numbers that can be checked by hand."""

from math import e

import msgspec
import pytest

from specserve.errors import ConfigError
from specserve_bench import results
from specserve_bench.results import Goals, MeasuredRequest, Ratio, Round, Speculation, Spread


def answer(number=0, arrived=0.0, first=1.0, last=2.0, tokens=5, **others):
    return MeasuredRequest(
        number=number,
        arrived_at=arrived,
        first_at=first,
        last_at=last,
        completion_tokens=tokens,
        **others,
    )


def a_round(*answers, seconds=2.0, **others):
    return Round(seconds=seconds, requests=list(answers), itl_ms=None, output_hash="x", **others)


def test_times_of_an_answer_count_from_when_it_was_due():
    a = answer(arrived=0.5, first=0.75, last=2.75, tokens=9, num_events=3)
    assert (a.ttft_ms, a.end_to_end_ms, a.tpot_ms) == (250.0, 2250.0, 250.0)


@pytest.mark.parametrize("num_events", [1, 2, 9])
def test_tpot_is_counted_by_tokens_whatever_the_number_of_events(num_events):
    assert answer(tokens=5, num_events=num_events).tpot_ms == 250.0


def test_what_did_not_happen_is_none():
    assert answer(tokens=1).tpot_ms is None
    lost = answer(first=None, last=None)
    assert (lost.ttft_ms, lost.end_to_end_ms, lost.tpot_ms) == (None, None, None)


def test_percentiles_lie_between_values():
    assert results.spread([float(n) for n in range(100, -1, -1)]) == Spread(50.0, 50.0, 90.0, 99.0)
    assert results.spread([4.0, 1.0]) == Spread(2.5, 2.5, pytest.approx(3.7), pytest.approx(3.97))
    assert results.spread([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)
    assert results.spread([]) is None


def test_a_spread_is_of_those_that_have_the_time():
    answers = [answer(tokens=1), answer(tokens=3), answer(tokens=5)]
    assert results.spread_of(answers, "tpot_ms") == results.spread([500.0, 250.0])


def test_acceptance_counts_the_bonus_and_every_verified_step():
    # Ten steps: four accept nothing, three one, two two, one three; the last was cut by an end.
    s = Speculation(steps=10, tokens=19, drafted=40, accepted=[4, 3, 2, 1])
    assert s.num_accepted == 10
    assert s.acceptance_length == 1.9
    assert s.acceptance_by_depth == [0.6, 0.3, 0.1]
    assert s.wasted_rows == 30 / 50
    nothing = Speculation(steps=0, tokens=0, drafted=0, accepted=[])
    assert (nothing.acceptance_length, nothing.acceptance_by_depth) == (None, [])
    assert nothing.wasted_rows is None


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({}, 1),
        ({"first": 1.001, "last": 1.101}, 0),  # TTFT
        ({"last": 1.21}, 0),  # TPOT
        ({"tokens": 1}, 1),
        ({"error": "cut"}, 0),
        ({"first": None, "last": None}, 0),
    ],
)
def test_goodput_counts_requests_within_both_goals(changed, good):
    kept = {"first": 1.0, "last": 1.2, "tokens": 5} | changed
    goals = Goals(ttft_ms=1000.0, tpot_ms=50.0)
    late = answer(first=1.0, last=1.2, arrived=-1.0)
    assert results.goodput(a_round(answer(**kept), late, seconds=4.0), goals) == good / 4


def test_figures_of_a_round():
    speculation = Speculation(steps=4, tokens=10, drafted=8, accepted=[1, 1, 1, 1])
    round = a_round(
        answer(tokens=5),
        answer(tokens=7, longest_stall_ms=30.0),
        answer(first=None, last=None, tokens=0, error="refused"),
        seconds=3.0,
        speculation=speculation,
        draft_seconds=0.5,
        verify_seconds=1.5,
        step_seconds=2.25,
    )
    figures = results.figures(round, Goals())
    assert figures["tokens_per_s"] == 4.0
    assert figures["acceptance_length"] == 2.5
    assert (figures["draft_s"], figures["verify_s"], figures["other_s"]) == (0.5, 1.5, 0.25)
    assert figures["stall_ms"] == Spread(30.0, 30.0, 30.0, 30.0)
    assert figures["errors"] == 1


def test_a_round_without_an_answer_has_no_figures_and_is_no_failure():
    figures = results.figures(
        a_round(answer(first=None, last=None, tokens=0), seconds=0.0), Goals()
    )
    assert (figures["tokens_per_s"], figures["goodput"], figures["ttft_ms"]) == (0.0, 0.0, None)
    assert figures["acceptance_by_depth"] == [] and figures["other_s"] is None


def test_ratios_are_taken_within_rounds():
    found = results.ratio([1.0, 4.0, 9.0], [2.0, 4.0, 3.0])
    assert (found.median, found.low, found.high) == (1.0, 0.5, 3.0)
    assert results.ratio([1.0, None], [2.0, 2.0]) == Ratio(0.5, 0.5, 0.5)
    assert results.ratio([None], [1.0]) is None


def test_an_interval_is_that_of_the_logarithms():
    # Logarithms -1, 0, 1: a mean of 0, a deviation of 1, and t = 4.303 with two degrees.
    low, high = e ** -(4.303 / 3**0.5), e ** (4.303 / 3**0.5)
    assert results.interval([e**-1, 1.0, e]) == pytest.approx((low, high))
    assert results.interval([2.0] * 7) == pytest.approx((2.0, 2.0))
    assert results.interval([2.0]) is None and results.interval([2.0, 0.0]) is None


def test_quantiles_are_those_of_the_tables():
    of_tables = {1: 12.706, 5: 2.571, 6: 2.447, 7: 2.365, 10: 2.228, 30: 2.042, 10**6: 1.960}
    for degrees, quantile in of_tables.items():
        assert results.student(degrees) == pytest.approx(quantile, rel=1e-3)


def test_a_hash_reports_texts_ends_and_their_order_apart():
    hashes = {
        results.output_hash(texts)
        for texts in ([("a", "stop"), ("b", "stop")], [("b", "stop"), ("a", "stop")])
    }
    hashes |= {results.output_hash([("ab", "stop")]), results.output_hash([("ab", "length")])}
    assert len(hashes) == 4
    assert results.output_hash([("ab", "stop")]) in hashes


def test_a_file_that_is_no_result_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.json.*check the path"):
        results.read(tmp_path / "gone.json")
    (tmp_path / "other.json").write_bytes(msgspec.json.encode({"rows": []}))
    with pytest.raises(ConfigError, match=r"other\.json: no results of `specserve bench`"):
        results.read(tmp_path / "other.json")
