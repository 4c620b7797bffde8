"""`figures real`: what is measured and counted, with scripted outputs instead of real weights."""

from types import SimpleNamespace

import msgspec
import pytest

from specserve.api.outputs import Logprob, RequestSpeculation, Timing
from specserve.errors import ConfigError
from specserve_bench.figures import real
from specserve_bench.figures.__main__ import main
from specserve_bench.figures.real import (
    RealSetting,
    Ties,
    chats,
    long_prompt,
    row,
    run_of,
    table,
    ties_of,
)


def output(token_ids, ms=10.0, steps=2, drafted=0, mean=None, logprobs=None):
    """A request of 4 prompt tokens whose first token took 5 ms."""
    return SimpleNamespace(
        token_ids=token_ids,
        prompt_token_ids=[1, 2, 3, 4],
        timing=Timing(5.0, None, 5.0 + ms),
        speculation=RequestSpeculation("auto", steps, drafted, 0, mean, 0),
        logprobs=logprobs,
    )


def test_a_run_adds_up_its_requests():
    outputs = [output([1, 2, 3], 8.0, steps=2), output([4] * 9, 12.0, 3, drafted=7, mean=3.0)]
    run = run_of(outputs)
    assert run.tpot_ms == 20 / 10  # milliseconds after first tokens, over these tokens
    assert (run.tokens, run.steps, run.nodes) == (2 + 9, 5, 7)


def test_a_row_pairs_rounds_and_compares_texts():
    runs = {
        "none": [run_of([output([1, 2, 3], ms)]) for ms in (10.0, 20.0, 30.0)],
        "auto": [run_of([output([1, 2, 3], ms, 2, 3, 1.5)]) for ms in (5.0, 30.0, 33.0)],
    }
    found = row(RealSetting("chat", 0.8, 1.05), runs)
    over = found["over_none"]
    assert (over.median, over.low, over.high) == (1.1, 0.5, 1.5)
    assert (found["tokens_per_step"], found["nodes_per_step"], found["is_same"]) == (1.5, 1.5, True)
    runs["auto"][1] = run_of([output([1, 2, 9])])
    assert not row(RealSetting("chat", 0.8, 1.05), runs)["is_same"]


def test_a_tie_is_a_position_whose_two_largest_logprobs_are_equal():
    def told(*values):
        return {i: Logprob(value, None, "") for i, value in enumerate(values)}

    responses = [
        [told(-1.0, -0.5), told(-0.7, -0.7), told(-0.7, -0.7, -0.7)],
        [told(-0.1, -3.0)],
    ]
    llm = SimpleNamespace(
        chat=lambda chats, params, use_tqdm: [output([1], logprobs=each) for each in responses]
    )
    assert ties_of(llm, ["?", "?"]) == Ties(4, 2, 2, 1)


def test_each_round_has_other_chats():
    texts = [f"program {i}" for i in range(7)]
    first, second = chats(texts, 0), chats(texts, 1)
    assert len(first) == len(second) == real.CHATS and not {*first} & {*second}
    assert len({*chats(texts, 19)}) == real.CHATS


def test_a_long_prompt_has_the_wanted_length_and_other_programs_for_each_number():
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: [*text], decode=lambda ids: "".join(ids)
    )
    llm, texts = SimpleNamespace(tokenizer=tokenizer), [chr(97 + i) * 30 for i in range(26)]
    one, other = (long_prompt(llm, texts, 500, number) for number in (0, 1))
    assert one != other and len(one) == len(other)
    assert abs(len(one) - 500) < 64


def test_the_table_shows_every_setting_ties_and_perplexities(tmp_path):
    runs = {name: [run_of([output([1, 2, 3])])] for name in real.SUBJECTS}
    rows = [row(setting, runs) for setting in real.SETTINGS]
    ties = Ties(1000, 1, 20, 1)._asdict()
    kept = {"rows": rows, "ties": ties, "perplexity": {"small": 5.25}}
    shown = table(msgspec.json.decode(msgspec.json.encode(kept)))
    for setting in real.SETTINGS:
        assert f"| {setting.name} | {setting.temperature:g} | 4 | 5.00 | 5.00 |" in shown
    assert "1 of 1000 positions (1 of 20 responses)" in shown and "small 5.2500" in shown


def test_without_real_weights_the_command_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no real weights in \.real: run `make real-models`"):
        main(["real", "--out", str(tmp_path / "real.json")])
