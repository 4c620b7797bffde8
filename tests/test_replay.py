"""The replay of recorded requests compares what clients get, and nothing that differs by chance."""

from itertools import islice

from tests.replay import NUMBER, joined, plain, requests


def chunk(text, **fields):
    return {"choices": [{"index": 0, "delta": {"content": text}} | fields]}


def test_the_requests_are_the_same_in_every_run():
    assert [*islice(requests(NUMBER), 20)] == [*islice(requests(NUMBER), 20)]
    assert {path.rpartition("/")[2] for path, _ in requests(NUMBER)} == {
        "completions",
        "responses",
    }


def test_deltas_may_be_cut_otherwise():
    whole = [chunk("abc"), chunk("", finish_reason="stop")]
    cut = [chunk("a"), chunk("bc"), chunk("", finish_reason="stop")]
    assert joined(whole) == joined(cut)


def test_another_text_or_field_is_seen():
    first = joined([chunk("ab"), chunk("", finish_reason="stop")])
    assert first != joined([chunk("ac"), chunk("", finish_reason="stop")])
    assert first != joined([chunk("ab"), chunk("", finish_reason="length")])
    assert first != joined([chunk("ab", logprobs=[1]), chunk("", finish_reason="stop")])
    assert first != joined([chunk("a"), {"usage": {}}, chunk("b"), chunk("", finish_reason="stop")])


def test_ids_times_and_wording_are_not_compared():
    error = {"message": "bad", "type": "t", "param": "n", "code": None}
    said = {"id": "x", "created": 1, "ttft_ms": 3, "error": error, "n": [{"text": "a", "id": "y"}]}
    assert plain(said) == {"error": {"type": "t", "param": "n", "code": None}, "n": [{"text": "a"}]}
