"""Requests to an engine in this process, under a clock that the test winds."""

from types import SimpleNamespace

import pytest

from specserve import LLM, SpeculationParams
from specserve_bench.local import Local
from specserve_bench.results import Load, Spread, output_hash
from specserve_bench.workloads import UNDRAFTED, Ask, Workload, edited, workload
from tests.checkpoints import tiny_checkpoint

STEP = 0.125  # seconds: binary fractions add up exactly


class ClockedLLM:
    """Each step takes 0.125 s and brings every request its next burst of tokens.

    A prompt "1 3 2" gets a token in its first step, three in the second, two in the third; the
    first burst is the prompt's own, the others come from verified steps.
    """

    def __init__(self):
        self.now, self.running, self.num_ended, self.is_reset = 100.0, [], 0, False
        stats = SimpleNamespace(draft_seconds=7.0, verify_seconds=8.0, step_seconds=9.0)
        self.is_forgetful = False
        self.engine = SimpleNamespace(stats=stats, draft_models=[], speculator=None)
        self.engine.scheduler = SimpleNamespace(costs=SimpleNamespace(reset=self.reset_learned))
        self.engine.plain_steps = SimpleNamespace(reset=self.reset_learned)
        self.input_processor = SimpleNamespace(render=lambda messages: messages[0]["content"])

    def clock(self):
        return self.now

    def wait(self, seconds):
        assert seconds > 0 and not self.running
        self.now += seconds

    def reset_cache(self):
        assert not self.running
        self.is_reset = True

    def reset_learned(self):
        assert not self.running
        self.is_forgetful = True

    def check(self, prompt, params):
        return prompt, params

    def start(self, prompt, params):
        bursts = list(map(int, prompt.split()))
        generation = SimpleNamespace(
            bursts=bursts,
            prompt=prompt.split(),
            token_ids=[],
            text=prompt,
            finish_reason="stop",
            is_done=False,
            steps=[(4, burst - 1) for burst in bursts[1:]],
            num_step_tokens=sum(bursts[1:]),
            num_drafted=4 * (len(bursts) - 1),
        )
        self.running.append(generation)
        return [generation]

    def step(self):
        self.now += STEP
        stats = self.engine.stats
        stats.draft_seconds += 0.25
        stats.verify_seconds += 0.5
        stats.step_seconds += 1.0
        for g in self.running:
            g.token_ids += [0] * g.bursts.pop(0)
            g.is_done = not g.bursts

    def end(self, generations):
        self.num_ended += len(generations)
        self.running = [g for g in self.running if g not in generations]


def asked(*prompts):
    return Workload("test", "a test", 0, [Ask(p, 8, 0.0, 0) for p in prompts])


def run(load, *prompts):
    llm = ClockedLLM()
    round = Local(llm, llm.clock, llm.wait).run(asked(*prompts), load)
    assert llm.num_ended == len(prompts) and not llm.running and llm.is_reset
    return round


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_round_begins_with_nothing_learnt_unless_it_is_warm(is_warm):
    llm = ClockedLLM()
    Local(llm, llm.clock, llm.wait, is_warm).run(asked("1 1"), Load(concurrency=1))
    assert llm.is_forgetful is not is_warm


def test_one_at_a_time_the_next_starts_when_the_last_has_ended():
    round = run(Load(concurrency=1), "1 3", "1 1 1")
    first, second = round.requests
    assert (first.arrived_at, first.first_at, first.last_at) == (0.0, STEP, 2 * STEP)
    assert (second.arrived_at, second.first_at, second.last_at) == (2 * STEP, 3 * STEP, 5 * STEP)
    assert (first.completion_tokens, first.num_events, first.tpot_ms) == (4, 2, 125 / 3)
    assert (second.tpot_ms, second.longest_stall_ms, second.ttft_ms) == (125.0, 125.0, 125.0)
    assert round.seconds == 5 * STEP


def test_a_step_without_tokens_is_a_longer_gap_and_no_event():
    round = run(Load(concurrency=1), "1 0 0 2")
    [answer] = round.requests
    assert (answer.num_events, answer.longest_stall_ms) == (2, 375.0)
    assert round.itl_ms == Spread(375.0, 375.0, 375.0, 375.0)


def test_steps_of_the_round_alone_are_counted():
    round = run(Load(concurrency=2), "1 3", "1 2 4")
    assert (round.draft_seconds, round.verify_seconds, round.step_seconds) == (0.75, 1.5, 3.0)
    speculation = round.speculation
    assert (speculation.steps, speculation.tokens, speculation.drafted) == (3, 9, 12)
    assert speculation.accepted == [0, 1, 1, 1]  # three, two and four tokens were said


def test_at_a_rate_requests_come_when_they_are_due_whoever_is_there(monkeypatch):
    due = [0.0, STEP / 2, 1.0]
    monkeypatch.setattr(Load, "due_times", lambda load, size: due)
    round = run(Load(rate=1.0), "1 1 1", "1", "1")
    assert [a.arrived_at for a in round.requests] == due
    # The second came during the first step, and its waiting for the step's end counts.
    assert [a.first_at for a in round.requests] == [STEP, 2 * STEP, 1.0 + STEP]
    assert round.requests[1].ttft_ms == 187.5
    assert round.seconds == 1.0 + STEP


def test_answers_keep_the_order_of_the_workload():
    round = run(Load(concurrency=3), "1 1 1", "1", "1 1")
    assert [a.number for a in round.requests] == [0, 1, 2]
    same = run(Load(concurrency=1), "1 1 1", "1", "1 1")
    assert round.output_hash == same.output_hash
    assert round.output_hash != run(Load(concurrency=1), "1", "1 1 1", "1 1").output_hash


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"max_position_embeddings": 2048}
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1, **sizes)


def test_an_engine_gets_what_a_request_expects_and_which_draft_tokens_it_may_have():
    llm, rare = ClockedLLM(), SpeculationParams(max_nodes=2)
    _, params = Local(llm).check(Ask("1", 8, 0.5, 7, "so it goes", rare))
    assert (params.prediction, params.speculation) == ("so it goes", rare)
    assert (params.max_tokens, params.temperature, params.seed) == (8, 0.5, 7)


def test_what_is_recorded_without_draft_tokens_is_what_is_measured_with_its_prediction(folder):
    settings = {"memory.kv_bytes": 1 << 26, "drafter.options": {"sources": ["prediction"]}}
    asked = workload("edit", 2, 0, temperature=0.8)
    with LLM(folder, set=settings, progress=False) as llm:
        local = Local(llm)
        texts = local.record(asked.with_speculation(UNDRAFTED).asks)
        assert llm.engine.stats.num_drafted == 0
        expected = asked.expecting(texts)
        assert [a.prediction for a in expected.asks] == [edited(text) for text in texts]
        plain, guessed = (local.run(w, Load(concurrency=1)) for w in (asked, expected))
    reasons = ["length" if r.completion_tokens == 192 else "stop" for r in plain.requests]
    recorded = output_hash([*zip(texts, reasons, strict=True)])
    assert plain.output_hash == guessed.output_hash == recorded
    assert plain.speculation.drafted == 0


def test_an_engine_says_the_same_whoever_draft_tokens_and_however_many_ask(folder):
    settings = {"model.threads": 1, "memory.kv_bytes": 1 << 26}
    questions = workload("questions", 4, 0)
    hashes = set()
    for drafter in ("none", "ngram"):
        with LLM(folder, drafter=drafter, set=settings, progress=False) as llm:
            for concurrency in (1, 4):
                round = Local(llm).run(questions, Load(concurrency=concurrency))
                hashes.add(round.output_hash)
                s = round.speculation
                assert s.tokens == sum(a.completion_tokens - 1 for a in round.requests)
                assert (s.drafted > 0) == (drafter == "ngram")
                assert round.draft_seconds + round.verify_seconds < round.step_seconds
    assert len(hashes) == 1
