"""The checker of sentences, and the texts that users see."""

import re

import pytest

from specserve.cli import command as cli
from specserve.config import Config, to_toml
from tests.prose import READERS, ROOT, WORDS, fault_of, python, sentences, strings, tracked

LONG = "The server " + "reads one token and " * 6 + "stops."


@pytest.mark.parametrize(
    ("sentence", "kind"),
    [
        ("The scheduler limits prompt chunks.", None),
        ("By default, the scheduler limits prompt chunks.", None),
        ("What does the scheduler limit?", None),
        ("`What` is the name of a field.", None),
        ("The flag `--guess` is refused.", None),
        (LONG, "long"),
        ("By a limit the scheduler keeps chunks short.", "start"),
        ("What is invalid is refused.", "start"),
        ("The drafter guesses the next token.", "word"),
        ("The [guesses](x.md) are verified.", "word"),
        ("Results are ROW-INVARIANT on CPUs.", "word"),
    ],
)
def test_a_sentence_fails_for_one_reason(sentence, kind):
    assert fault_of(sentence) == kind


def test_a_paragraph_is_split_at_ends_of_sentences_only():
    text = "One is e.g. `a.b` here. Two (see vs. No. 3) is there: Three follows now."
    assert [*sentences(text)] == [
        "One is e.g. `a.b` here.",
        "Two (see vs. No. 3) is there:",
        "Three follows now.",
    ]


SOURCE = '''
"""A module reads files."""

LIMIT = 3  # files per call

def f(x):
    """Read the file.

    name  text of one field
          that goes on
    """
    log.warning("the file %s has no end", x)
    return f"the file {x} was read twice" + "abc" + r"(\\w+) not a text at all"
'''


def test_docstrings_fields_comments_and_messages_of_python_are_read():
    texts = [" ".join(text.split()) for text in python(SOURCE) if text.strip()]
    assert texts == [
        "A module reads files.",
        "Read the file.",
        "text of one field that goes on",
        "the file %s has no end",
        "the file x was read twice",
        "files per call",
    ]


@pytest.mark.parametrize(
    ("suffix", "text", "found"),
    [
        (
            ".md",
            "# What\n\n| a guess here | b |\n\n```sh\nguess\n```\n- one item\n",
            "a guess here",
        ),
        (".cpp", "int a;  // adds two numbers\n", "adds two numbers"),
        (".js", 'show("no draft tokens were sent");', "no draft tokens were sent"),
        (".html", "<p>One <b>bold</b> word</p><script>var a = 1;</script>", "One bold word"),
        (".toml", "a = 1\n# sets the port\n", "sets the port"),
    ],
)
def test_every_kind_of_file_is_read(suffix, text, found):
    texts = [t.strip() for t in READERS[suffix](text) if t.strip()]
    assert found in texts and not any("var a" in t or t == "guess" for t in texts)


def subcommands(parser, path=()):
    yield parser.format_help()
    for action in parser._actions:
        for name, sub in (action.choices or {}).items() if hasattr(action, "_parser_class") else ():
            yield from subcommands(sub, (*path, name))


def test_help_and_the_shown_config_have_no_private_word():
    shown = [*subcommands(cli.parser({})), to_toml(Config())]
    assert len(shown) >= 8
    assert [(m[0], text[:60]) for text in shown for m in WORDS.finditer(text)] == []


def test_errors_logs_and_pages_have_no_private_word():
    """Strings of the product, and texts of its pages: all that a user can see."""
    found = []
    for name in tracked(["specserve", "drafters", "kernels"]):
        path = ROOT / name
        texts = strings(path.read_text()) if path.suffix == ".py" else ()
        if "/page/" in name:
            texts = READERS[path.suffix](path.read_text())
        found += [(name, text) for text in texts if WORDS.search(re.sub(r"`[^`]*`", "x", text))]
    assert found == []
