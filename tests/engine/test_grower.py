"""Of several models the one guesses first with which steps are the fastest."""

from specserve.engine.grower import AGAIN, KNOWN, FirstTurns
from specserve.models.eagle_loader import load_eagle_head
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock
from tests.engine.engines import Case, Watch, engine_for, load_small
from tests.engine.test_head_model import PROMPT, sampling
from tests.models.eagle_heads import write_head


def test_each_is_first_a_few_times_then_the_faster_one():
    turns, seen = FirstTurns(), []
    for _ in range(2 * KNOWN + 3 * AGAIN):
        seen.append(name := turns.choose(["a", "b"]))
        turns.add(name, 5.0 if name == "b" else 2.0)
    assert seen[: 2 * KNOWN].count("a") == KNOWN
    later = seen[2 * KNOWN :]
    assert later.count("a") == 3 and later[AGAIN - 1] == "a", "it is tried again now and then"


def test_one_that_becomes_faster_is_first():
    turns = FirstTurns()
    for step in range(20 * AGAIN):
        name = turns.choose(["a", "b"])
        turns.add(name, {"a": 2.0 if step < AGAIN else 9.0, "b": 5.0}[name])
    assert turns.choose(["a", "b"]) == "a"


def test_an_engine_learns_how_fast_steps_are_with_each_of_them_first(tmp_path, monkeypatch):
    Clock(monkeypatch)
    target = load_small(tiny_checkpoint(tmp_path / "target", seed=1, num_hidden_layers=4))
    write_head(tmp_path / "head")
    head = load_eagle_head(tmp_path / "head", target)
    engine = engine_for(target, target, "auto", head=head)
    Watch(engine).run([Case(PROMPT[:40], sampling(240))])
    [learned] = engine.guesses.learned.every
    rates = learned.first_turns.rates
    assert rates.keys() == {"eagle", "model"}
    assert all(steps >= KNOWN and rate > 100 for steps, rate in rates.values()), rates
