"""How lm-eval is run beside specserve and transformers, and what is made of its times."""

import json
import sys

import pytest

from specserve.errors import ConfigError
from specserve_bench.figures import lm_eval
from specserve_bench.figures.lm_eval import Evaluation, LmEval

ENDS = "import sys\nprint('no such model', file=sys.stderr)"
FAILS = 'print(\'{"error": "a wrong task"}\', flush=True)\ninput()'


class Fake:
    """Takes `seconds` an item in its best setting, twice that in others."""

    def __init__(self, seconds, best, loglikelihood):
        self.seconds, self.best, self.loglikelihood = seconds, best, loglikelihood
        self.seen = []

    def run(self, task, numbers, **setting):
        self.seen.append(list(numbers))
        each = self.seconds * (1 if setting == self.best else 2)
        answers = {n: [[self.loglikelihood, n % 2 == 0]] for n in numbers}
        return Evaluation(each * len(numbers), {}, answers)


def contenders():
    ours = Fake(0.5, {"_concurrent": 16}, -1.0)
    theirs = Fake(1.0, {"batch_size_per_gpu": 8}, -1.25)
    return {lm_eval.OURS: ours, lm_eval.THEIRS: theirs}


ABOUT = {"items": {"number": 10}, "num_parts": 3}


def test_rates_are_of_all_parts_in_the_best_setting():
    fakes = contenders()
    *_, told = lm_eval.measured(ABOUT, fakes)
    assert told["setting"] == {name: fake.best for name, fake in fakes.items()}
    assert told["items_per_s"] == {lm_eval.OURS: 2.0, lm_eval.THEIRS: 1.0}
    assert told["rate_over_theirs"] == told["rate_over_theirs_in_parts"]["median"] == 2.0
    assert (told["mean_apart"], told["greedy_by_only_one"]) == (0.25, 0)
    for fake in fakes.values():
        assert sorted(n for part in fake.seen[-3:] for n in part) == [*range(10)]
    assert f"| {lm_eval.OURS} | concurrent requests: 16 | 2.00 |" in lm_eval.table(told)


def test_parts_that_are_kept_are_not_measured_again(tmp_path):
    *_, whole = lm_eval.measured(ABOUT, contenders())
    first, *_ = lm_eval.measured(ABOUT, contenders())
    file = tmp_path / "kept.json"
    file.write_text(json.dumps(first))
    fakes = contenders()
    *_, told = lm_eval.measured(lm_eval.kept(file, ABOUT), fakes)
    assert told == whole
    for fake in fakes.values():
        _, *seen = fake.seen  # without the run before them
        assert seen == [[1, 4, 7], [2, 5, 8]]
    assert lm_eval.kept(tmp_path / "none.json", ABOUT) == ABOUT
    with pytest.raises(ConfigError, match="other parts"):
        lm_eval.kept(file, ABOUT | {"num_parts": 4})


def test_items_are_lines_of_code_and_the_next_one():
    docs = lm_eval.items(20)
    assert docs == lm_eval.items(40)[:20]
    for doc in docs:
        assert doc["target"].startswith("\n") and doc["target"].strip()
        assert 0 < len(doc["context"]) <= lm_eval.CHARACTERS[1]
        assert not doc["context"].endswith((" ", "\n"))  # lm-eval would make it the target's


@pytest.mark.parametrize(("script", "words"), [(ENDS, "no such model"), (FAILS, "a wrong task")])
def test_an_lm_eval_that_fails_says_why(tmp_path, script, words):
    (tmp_path / "lm_eval.py").write_text(script)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/lm_eval.py\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=words), LmEval(str(python), "hf", {}, tmp_path):
        pass
