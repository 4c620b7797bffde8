import importlib
import sys

import pytest

from specserve_drafters import DrafterError, make_drafter
from specserve_drafters.model import ModelDrafter
from specserve_drafters.ngram import NgramDrafter

WRONG = {  # name, options -> words of the refusal
    "an unknown name": ("oracle", {}, r"'oracle'.*none, auto, ngram, model.*package\.module:Class"),
    "an unknown module": ("no_such.module:Drafter", {}, "Unknown drafter 'no_such.module:Drafter'"),
    "an unknown class": ("specserve_drafters.ngram:Bigram", {}, "Unknown drafter.*Bigram"),
    "a module alone": ("specserve_drafters.ngram", {}, "Unknown drafter"),
    "a relative module": (".x:Y", {}, r"Unknown drafter '\.x:Y' \(TypeError"),
    "what a head is called elsewhere": (
        "eagle3",
        {},
        r"Unknown drafter 'eagle3': use 'eagle'",
    ),
    "an unknown option of auto": (
        "auto",
        {"sourcs": ["ngram"]},
        "`sourcs`.*Available options: sources, ",
    ),
    "no name": ("", {}, "Unknown drafter ''"),
    "something that is no drafter": ("collections:deque", {}, "'collections:deque'.*Options"),
    "an unknown option": ("ngram", {"max_gram": 3}, "'ngram'.*max_gram"),
    "an option out of range": ("ngram", {"max_ngram": 65}, r"'ngram'.*<= 64.*\$\.max_ngram"),
    "an option below its range": ("ngram", {"min_ngram": 0}, r"'ngram'.*>= 1.*\$\.min_ngram"),
    "an option of another type": ("ngram", {"max_ngram": "4"}, r"`int`.*\$\.max_ngram"),
    "options at odds": ("ngram", {"min_ngram": 5}, "min_ngram=5 exceeds max_ngram=4"),
    "a depth beyond a mask": ("model", {"max_depth": 64}, r"'model'.*\$\.max_depth"),
    "no width": ("model", {"width": 0}, r"'model'.*\$\.width"),
    "a tau of zero": ("model", {"tau": 0.0}, r"'model'.*\$\.tau"),
    "a negative gain": ("model", {"min_gain": -1.0}, r"'model'.*\$\.min_gain"),
    "nothing to run": ("model", {}, "'model' needs a draft model. Set drafter.model"),
}


@pytest.mark.parametrize(("name", "options", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_drafter_is_refused_with_its_name(name, options, words):
    with pytest.raises(DrafterError, match=words):
        make_drafter(name, options)


@pytest.mark.parametrize("name", ["ngram", "specserve_drafters.ngram:NgramDrafter"])
def test_a_drafter_is_found_by_name_or_by_its_class(name):
    drafter = make_drafter(name, {"max_ngram": 3})
    assert isinstance(drafter, NgramDrafter)
    assert list(drafter.sizes) == [3, 2]


def test_who_needs_an_executor_is_given_it():
    executor = object()
    drafter = make_drafter("model", {"width": 2}, executor)
    assert isinstance(drafter, ModelDrafter)
    assert (drafter.executor, drafter.options.width) == (executor, 2)


def test_who_needs_none_is_given_none():
    assert isinstance(make_drafter("ngram", {}, object()), NgramDrafter)


MINE = """
{0}
class Mine:
    class Options(__import__("specserve_drafters").base.Options, frozen=True):
        pass
    def __init__(self, options):
        {1}
    def propose(self, items):
        return []
class Scored(Mine):
    propose = None
    def candidates(self, items):
        return []
class Neither(Mine):
    propose = None
not_mine = 3
"""

FAILING = {  # at import, at construction, the class -> words of the refusal
    "the import raises": ("1 / 0", "pass", "Mine", "ZeroDivisionError: division by zero"),
    "the import exits": ("raise SystemExit('bye')", "pass", "Mine", "SystemExit: bye"),
    "the import is no Python": ("for", "pass", "Mine", "SyntaxError"),
    "the construction raises": ("", "self.gone", "Mine", "AttributeError.*'gone'"),
    "the construction exits": ("", "raise SystemExit('bye')", "Mine", "SystemExit: bye"),
    "it is no class": ("", "pass", "not_mine", "is of type int. Name a class"),
}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Write a user's module; its name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_users_own", raising=False)
    importlib.invalidate_caches()
    return lambda *code: (tmp_path / "a_users_own.py").write_text(MINE.format(*code))


@pytest.mark.parametrize(("top", "init", "cls", "words"), FAILING.values(), ids=FAILING)
def test_what_a_users_drafter_does_wrong_is_refused_with_the_reason(mine, top, init, cls, words):
    mine(top, init)
    with pytest.raises(DrafterError, match=f"a_users_own:{cls}'.*{words}"):
        make_drafter(f"a_users_own:{cls}", {})


def test_who_has_candidates_alone_is_a_source_of_auto(mine):
    mine("", "pass")
    with pytest.raises(DrafterError, match=r"no method `propose`.*drafter\.options\.sources"):
        make_drafter("a_users_own:Scored", {})
    make_drafter("a_users_own:Scored", {}, is_source=True)
    with pytest.raises(DrafterError, match="no method `propose` or `candidates`"):
        make_drafter("a_users_own:Neither", {}, is_source=True)
    with pytest.raises(DrafterError, match=r"'mtp': use 'eagle'"):
        make_drafter("mtp", {}, is_source=True)
    with pytest.raises(
        DrafterError, match=r"unknown source .auto.\. Choose from .*grammar, prediction"
    ):
        make_drafter("auto", {}, is_source=True)


def test_a_drafter_that_does_not_say_needs_no_executor(mine):
    mine("", "self.options = options")
    assert make_drafter("a_users_own:Mine", {}, object()).options is not None
