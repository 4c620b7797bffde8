"""The training corpus of the demo pair, and what it leaves out."""

import pytest

from specserve_bench.demo import corpus
from specserve_bench.demo.corpus import EVALUATION_FILES, library, source_files, symbols, turns
from specserve_bench.demo.held_out import questions_about

PHRASINGS = (corpus.PURPOSE, corpus.SIGNATURE, corpus.CALL, corpus.NAME)


@pytest.fixture(scope="module")
def known():
    return {s.name: s for s in symbols(library())}


def test_evaluation_files_exist_and_are_not_read():
    assert all((library() / name).is_file() for name in EVALUATION_FILES)
    assert not set(source_files(library())) & set(EVALUATION_FILES)


def test_nothing_is_asked_about_what_is_held_out(known):
    modules = {n.removesuffix(".py").replace("/", ".") for n in EVALUATION_FILES}
    assert not {name for name in known if name.rpartition(".")[0] in modules}


def test_a_function_is_known_by_its_signature_a_call_and_its_first_sentence(known):
    copytree = known["shutil.copytree"]
    assert copytree.signature.startswith("(src, dst, symlinks=False, ")
    assert copytree.call == "shutil.copytree(src, dst)"
    assert copytree.summary.startswith("Recursively copy a directory tree")
    assert known["os.path.join"].summary and known["math.sqrt"].call == "math.sqrt(x)"


def test_held_out_phrasings_are_never_trained_on(known):
    held_out = {p.split("{}")[0] for phrasings in PHRASINGS for p in phrasings.held_out}
    assert not {p.split("{}")[0] for phrasings in PHRASINGS for p in phrasings.training} & held_out
    asked = {turn.question for s in known.values() for turn in turns(s)}
    assert not asked & {q.question for q in questions_about(known.values())}


SOURCE = '''
def shown(a, /, b, *, c, d=1):
    """Say what it is. Then go on."""

def silent(): pass

def _hidden():
    """Nobody has to know this."""

class Box:
    """A box for one thing."""
    def __init__(self, thing): pass
'''


def test_only_what_is_public_and_says_what_it_is_is_asked_about(tmp_path):
    (tmp_path / "module.py").write_text(SOURCE)
    (tmp_path / "_private.py").write_text(SOURCE)
    found = {s.name: s for s in corpus.symbols_of_sources(tmp_path)}
    assert found.keys() == {"module.shown", "module.Box"}
    assert found["module.shown"].call == "module.shown(a, b, c=c)"
    assert (found["module.shown"].summary, found["module.shown"].more) == (
        "Say what it is.",
        "Then go on.",
    )
    assert found["module.Box"].signature == "(thing)"
