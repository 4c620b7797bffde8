"""What terminals show of guesses: colored text, and trees."""

import re
from types import SimpleNamespace

import pytest

from specserve import LLM, SamplingParams
from specserve.api import watch
from specserve.api.watch import Colored, harmless, legend, step_words, tree_lines
from specserve.cli import command as cli
from specserve.exchange.messages import StepDetails, VerifiedTree

NO_TREE = VerifiedTree([], [], [], [])
COLOR = {1: "32", 2: "34", 3: "32;4"}
ANSI = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture
def colors(monkeypatch):
    monkeypatch.setattr(watch, "has_colors", lambda: True)


def step(tokens, ends, sources, tree=NO_TREE):
    return StepDetails(tokens, ends, sources, tree)


def painted(text, bits):
    return f"\x1b[{COLOR[bits]}m{text}\x1b[0m"


def test_a_token_has_the_color_of_who_drafted_it(colors):
    colored = Colored()
    colored.add_steps([step([1, 2, 3], [3, 5, 9], [1, 3, 0])])
    assert colored.shown("thecat a") == painted("the", 1) + painted("ca", 3)
    assert colored.shown("n") == "t an"  # its end was held back
    colored.add_steps([step([4], [12], [2])])
    assert colored.shown("d\nx") == painted("d", 2) + "\n" + painted("x", 2)


def test_text_of_no_reported_token_is_plain_and_nothing_is_lost(colors):
    colored = Colored()
    assert colored.shown("as it comes") == "as it comes"
    colored.add_steps([step([1, 2], [14, 14], [1, 2])])  # the second has no text of its own
    assert colored.shown("abc") == painted("abc", 1)
    colored.add_steps([step([3], [30], [1])])  # a stop string has cut its text
    assert colored.shown("de") == ""
    assert colored.rest() == "de"


TREE = VerifiedTree([318, 11, 262, 9], [0, 0, 1, 1], [3, 1, 2, 2], [1, 3])
TEXTS = {318: " is", 11: ",", 262: " a long token of many letters", 9: "\n"}


def test_a_tree_has_a_line_for_each_of_its_leaves(colors):
    lines = tree_lines(step([318, 262, 5], [1, 2, 3], [3, 2, 0], TREE), TEXTS.__getitem__)
    assert [ANSI.sub("", line) for line in lines] == [
        "● ─┬─ ␣is ─┬─ ␣a␣long␣token␣of␣…",
        "   │       └─ ↵",
        "   └─ ,",
    ]
    assert "\x1b[1;32;4m␣is\x1b[0m" in lines[0]  # accepted, of two sources
    assert "\x1b[2m↵\x1b[0m" in lines[1] and "\x1b[2m,\x1b[0m" in lines[2]


def test_no_text_moves_the_cursor_or_hides_a_token(colors):
    tree = VerifiedTree([1, 2, 3, 4], [0, 1, 2, 3], [1, 1, 1, 1], [])
    texts = {1: "\x1b[2J", 2: "", 3: "\r\t", 4: "\x9b\x07\u202e"}
    [line] = tree_lines(step([9], [1], [0], tree), texts.__getitem__)
    assert ANSI.sub("", line) == "● ─── ␛[2J ─── ∅ ─── ␍⇥ ─── ���"
    assert harmless("a\x1b[2J\tb\n\x9b\u2066c") == "a�[2J\tb\n��c"
    assert ANSI.sub("", legend(["\x1b[2J"])).startswith("accepted draft tokens of �[2J")


def test_words_and_legend(colors):
    assert step_words(7, step([318, 262, 5], [1, 2, 3], [3, 2, 0], TREE)) == (
        "step 7: 4 draft tokens, 2 accepted, 3 new tokens"
    )
    assert ANSI.sub("", legend(["ngram", "model"])).startswith("accepted draft tokens of ngram")


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "has"),
    [(True, None, True), (True, "", True), (True, "1", False), (False, None, False)],
)
def test_colors_are_for_a_terminal_whose_user_has_nothing_against_them(
    monkeypatch, is_terminal, no_color, has
):
    monkeypatch.setattr(watch.sys, "stdout", SimpleNamespace(isatty=lambda: is_terminal))
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    assert watch.has_colors() is has


def test_without_colors_accepted_draft_tokens_are_in_brackets():
    colored = Colored()
    colored.add_steps([step([1, 2, 3], [3, 5, 9], [1, 3, 0])])
    assert colored.shown("thecat an") == "[the][ca]t an"
    lines = tree_lines(step([318, 262, 5], [1, 2, 3], [3, 2, 0], TREE), TEXTS.__getitem__)
    assert lines == [
        "● ─┬─ [␣is] ─┬─ [␣a␣long␣token␣of␣…]",
        "   │         └─ ↵",
        "   └─ ,",
    ]
    assert legend(["ngram", "model"]) == (
        "[accepted draft tokens] of ngram, model; a terminal shows the source by color"
    )


PROMPT = "def f(a, b):\n    return a + b\n\ndef f(a, b):\n    return a"


def test_the_command_draws_steps_with_draft_tokens_and_the_whole_text(colors, capsys):
    flags = ["--temperature=0", "--max-tokens=24", "--set=memory.kv_bytes=67108864"]
    assert cli.main(["generate", PROMPT, "--drafter=ngram", "--watch", *flags]) == 0
    out, err = capsys.readouterr()
    params = SamplingParams(temperature=0, max_tokens=24, return_speculation_details=True)
    with LLM(drafter="ngram", set={"memory.kv_bytes": 1 << 26}, progress=False) as llm:
        [output] = llm.generate(PROMPT, params)
    plain = ANSI.sub("", out)
    assert plain.endswith(f"\n{output.text}\n")
    steps = [s for s in output.speculation.details if s.tree.tokens]  # empty steps are not drawn
    counts = [(len(s.tree.tokens), len(s.tree.accepted), len(s.tokens)) for s in steps]
    words = r"^step \d+: (\d+) draft tokens?, (\d+) accepted, (\d+) new tokens?"
    told = re.findall(words, plain, re.M)
    assert [tuple(map(int, each)) for each in told] == counts
    assert sum(right for _, right, _ in counts) and "\x1b[1;32m" in out
    assert "accepted draft tokens of" in err


def test_json_and_pictures_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "a", "--json", "--watch"])
    assert "not allowed with" in capsys.readouterr().err
