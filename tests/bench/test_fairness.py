"""How the fairness figures are taken."""

from specserve_bench.figures import fairness


def test_a_small_request_is_timed_alone_and_next_to_each_large_one(monkeypatch):
    small = {"ROUNDS": 1, "CHOICES": 6, "CHOICE_TOKENS": 8, "LONG_PROMPT": 900}
    for name, value in small.items():
        monkeypatch.setattr(fairness, name, value)
    figures = fairness.measure()
    large = ["beside 6 choices of 8 tokens", "beside a prompt of 900 tokens"]
    assert [*figures] == ["alone", *large]
    assert all(f["steps"] == 1 and f["ttft_ms"] > 0 for f in figures.values())
    assert fairness.table(figures).count("\n| ") == 4
