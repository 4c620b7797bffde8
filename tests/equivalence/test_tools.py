"""Some conversations of `make equivalence-tools`, which runs all of them."""

from tests.equivalence.tools import CHAT, COLUMNS, MESSAGES, NUM, asked, check


def test_some_conversations_have_the_same_calls_with_drafters():
    failures, facts = check(["ngram", "auto"], range(0, NUM, 25))
    assert not failures, failures
    assert "tool_calls" in facts["none"] and "tool_use" in facts["none"]


def test_the_conversations_cover_routes_temperatures_and_choices():
    bodies = [asked(i) for i in range(NUM)]
    seen = {(p, b["temperature"], str(b["tool_choice"])[:30]) for p, b in bodies}
    assert {(p, t) for p, t, _ in seen} == {(p, t) for p in (CHAT, MESSAGES) for t in (0, 1)}
    assert len({choice for p, _, choice in seen if p == CHAT}) >= 3
    assert {*COLUMNS} == {"none", "ngram", "model", "eagle", "auto"}
