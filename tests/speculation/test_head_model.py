"""A head's KV and features are those of the text, whatever happened to it on the way."""

from random import Random

import pytest
import torch

from specserve.exchange.sampling_params import Sampling
from specserve.models.eagle_head import load_eagle_head
from specserve.models.mtp_head import load_mtp_head
from specserve.speculation import head_model
from specserve_drafters import ROOT, Draft, Nodes
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import (
    Case,
    Scripted,
    Watch,
    bush,
    engine_for,
    fixed,
    hedge,
    load_small,
    plain,
    row_counts,
    wrong_later,
)
from tests.engine.heads import Oracle, close
from tests.models.eagle_heads import write_head
from tests.models.mtp_layers import write_target

PROMPT = [(7 * i) % 300 for i in range(90)]


@pytest.fixture(scope="module")
def target(pairs):
    return pairs["eagle"][0]


@pytest.fixture(scope="module")
def head(pairs):
    return pairs["eagle"][1]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A target and its head: one of two layers, with some of the target's tokens only, and one that
    came with the target, which may have recurrent layers.
    """
    root = tmp_path_factory.mktemp("models")
    target = load_small(tiny_checkpoint(root / "target", seed=1, num_hidden_layers=4))
    write_head(root / "head", num_hidden_layers=2, norm_before_residual=True)
    write_target(root / "mtp")
    other = load_small(root / "mtp" / "target")
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    write_target(root / "hybrid", "qwen", "qwen3_5", **layers)
    hybrid = load_small(root / "hybrid" / "target")
    return {
        "eagle": (target, load_eagle_head(root / "head", target)),
        "mtp": (other, load_mtp_head(root / "mtp" / "target", other)),
        "hybrid": (hybrid, load_mtp_head(root / "hybrid" / "target", hybrid)),
    }


def in_all(head, logits):
    """The head's logits among those of all of the target's tokens."""
    wide = torch.full((320,), float("-inf"))
    wide[head.target_ids(torch.arange(head.draft_vocab_size))] = logits
    return wide


def sampling(n=30, temperature=0.0, seed=3):
    return Sampling(max_tokens=n, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed)


EVENTS = dict(zip(range(6, 40, 3), ["preempt", "squeeze", "reset"] * 4, strict=True))
CASES = [
    Case(PROMPT, sampling()),
    Case(PROMPT[:70], sampling(20, 1.0), arrives=3, n=4),
    Case([*PROMPT[:50], *PROMPT], sampling(25), arrives=14),
    Case(PROMPT, sampling(12, 0.7, seed=8), arrives=20, leaves=24),
    Case([*PROMPT[:33], 5, 6], sampling(40), arrives=22),
]


class Checks:
    """Has the head run for some of the requests now and then, compares that, and says what another
    drafter says.
    """

    def __init__(self, drafter, target, head):
        self.drafter, self.target, self.head, self.executor = drafter, target, head, None
        self.rng, self.num_asked, self.num_seen, self.failures = Random(1), 0, 0, []

    def propose(self, items):
        asked = [item for item in items if self.rng.random() < 0.4]
        ready, logits = self.executor.extend(asked)
        self.num_asked += sum(self.executor.requests[item.id].num_output > 0 for item in asked)
        for i, row in zip(ready, logits, strict=True):
            oracle = Oracle(self.target, self.head, asked[i].token_ids.tolist())
            self.num_seen += 1
            if not torch.allclose(row, in_all(self.head, oracle.logits), rtol=1e-4, atol=1e-4):
                self.failures.append(asked[i])
        return self.drafter.propose(items)

    def observe(self, *args):
        self.drafter.observe(*args)

    def forget(self, id):
        self.drafter.forget(id)


@pytest.mark.parametrize(
    ("kind", "script"),
    [("eagle", bush), ("eagle", hedge), ("eagle", wrong_later), ("hybrid", bush)],
)
@pytest.mark.parametrize(
    ("block_size", "max_batched_tokens", "events"), [(16, 512, {}), (17, 48, EVENTS), (4, 40, {})]
)
def test_what_a_head_goes_on_from_is_what_the_target_had(
    pairs, kind, script, block_size, max_batched_tokens, events
):
    """Of trees of which some nodes are right, chunked prompts, hits, forks, and what was preempted:
    in every step the logits after the newest token are those of the whole text.
    """
    target, head = pairs[kind]
    texts = iter(plain(target, CASES))
    each = [[next(texts) for _ in range(case.n)] for case in CASES]
    order = sorted(range(len(CASES)), key=lambda i: (CASES[i].arrives, i))
    truth = dict(enumerate(text for i in order for text in each[i]))
    checks = Checks(Scripted(script, truth), target, head)
    engine = engine_for(
        target,
        None,
        checks,
        head=head,
        block_size=block_size,
        max_batched_tokens=max_batched_tokens,
        max_running=5,
        max_nodes=9,
    )
    engine.speculator.draft_model = checks.executor = engine.head
    engine.head.watch = None  # which has all rows run at once
    watch = Watch(engine)
    got = watch.run(CASES, events)
    assert checks.num_seen > 5 and checks.num_asked == checks.num_seen and watch.seen["found"]
    assert not checks.failures and (not events or watch.seen["preempted"])
    assert not engine.head.backlogs.keys() - engine.head.ended, "nothing is kept of who has ended"
    said = [request.token_ids.tolist() for request in got]
    whole = [text for texts in each for text in texts]
    assert [s == w[: len(s)] for s, w in zip(said, whole, strict=True)] == [True] * len(said)


BLOCK = 16
ENDS = {"by itself": {}, "when it is left": {"leaves": 30}}


@pytest.mark.parametrize("leaves", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("kept", [head_model.KEPT, 40])
@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_what_waits_of_a_request_alone_is_run_when_it_ends(pairs, kind, leaves, kept, monkeypatch):
    """Nobody is asked for guesses of the first request, and the second finds its blocks."""
    target, head = pairs[kind]
    monkeypatch.setattr(head_model, "KEPT", kept)
    monkeypatch.setattr(head_model, "PIECE", 16)
    engine = engine_for(target, None, "ngram", head=head, block_size=BLOCK)
    checks = Checks(Scripted(hedge, {}), target, head)
    engine.speculator = fixed(engine, checks)
    engine.speculator.draft_model = checks.executor = engine.head
    checks.rng.random = lambda: 1.0
    watch, lengths, finish = Watch(engine), noted_lengths(engine), engine.finish

    def followed(id):
        engine.head.follow_timed(engine.stats)
        finish(id)

    if leaves:
        engine.finish = followed  # so that no more is to be done than what waits
    [first] = watch.run([Case(PROMPT[:40], sampling(60), **leaves)], is_kept=True)
    engine.rest()
    assert max(lengths) > min(65, kept - 1) and not lengths[-1] and not engine.head.ended
    checks.rng.random = lambda: 0.0
    watch.run([Case([*first.token_ids, 7, 8], sampling(12))])
    assert watch.seen["found"] == 1 and checks.num_seen >= 10 and not checks.failures


def test_what_waits_of_a_request_alone_is_run_before_another_one_begins(target, head, monkeypatch):
    """As it may be given the same blocks; and of what is too much to be kept the oldest is."""
    monkeypatch.setattr(head_model, "KEPT", 48)
    monkeypatch.setattr(head_model, "PIECE", 16)
    engine = engine_for(target, head=head, max_batched_tokens=40, max_running=4)
    lengths = noted_lengths(engine)
    Watch(engine).run([Case(PROMPT[:20], sampling(120)), Case(PROMPT, sampling(4), arrives=90)])
    assert max(lengths) == 48 and min(lengths[40:85]) == 33, "not all of them, and not one by one"
    assert max(lengths[95:105]) <= 2 * BLOCK


def test_who_comes_while_rows_wait_gets_its_first_token_before_they_are_run(target, head):
    engine = engine_for(target, head=head, max_batched_tokens=128, max_running=4)
    engine.head.watch = None
    engine.add(PROMPT[:60], sampling(100))
    for _ in range(40):
        engine.step()
    before, newcomer = engine.head.num_rows, engine.add(PROMPT[30:], sampling(9))
    engine.step()
    assert newcomer.num_output == 1 and engine.head.num_rows == before
    engine.step()
    assert engine.head.num_rows >= before + 60 + 39 + 60 and not engine.head.backlogs


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_watched_head_runs_no_more_rows_at_once_than_a_step_has(target, head, is_alone):
    engine = engine_for(target, head=head, max_batched_tokens=40, max_running=4)
    rows, logits, read = row_counts(engine.head.runner), engine.head.logits, []

    def noted(hidden):
        read.append(len(hidden))
        return logits(hidden)

    engine.head.logits = noted
    cases = [Case(PROMPT[:20], sampling(150)), Case(PROMPT, sampling(150))]
    Watch(engine).run(cases[: 2 - is_alone])
    engine.rest()
    assert max(map(sum, rows)) <= 40 and 5 < max(read) <= 40


@pytest.mark.parametrize(("failing", "size"), [("fuse", 60), ("fuse", 1), ("aux_hidden_states", 1)])
def test_nobody_finds_blocks_that_lack_what_a_head_has_failed_to_run(
    target, head, failing, size, monkeypatch
):
    """Else every later text that begins alike would have worse guesses."""
    engine = engine_for(target, None, "ngram", head=head, block_size=BLOCK)
    checks = Checks(Scripted(hedge, {}), target, head)
    engine.speculator = fixed(engine, checks)
    engine.speculator.draft_model = checks.executor = engine.head
    checks.rng.random = lambda: 1.0
    watch = Watch(engine)
    [first] = watch.run([Case(PROMPT[:40], sampling(size))], is_kept=True)
    with monkeypatch.context() as patch:
        patch.setattr(head if failing == "fuse" else engine.head, failing, lambda _: 1 / 0)
        engine.rest()
    assert engine.stats.sources["eagle"].errors == 1
    assert not engine.head.backlogs and not engine.head.seen
    checks.rng.random = lambda: 0.0
    watch.run([Case([*first.token_ids, 7, 8], sampling(12))])
    assert watch.seen["found"] == 0 and checks.num_seen >= 10 and not checks.failures


def test_of_many_rows_only_the_kv_is_computed_but_for_the_last_one(target, head):
    engine = engine_for(target, head=head, max_batched_tokens=48, max_running=4)
    engine.head.watch, rows = None, row_counts(engine.head.runner)
    Watch(engine).run([Case(PROMPT[:80], sampling(3)), Case(PROMPT, sampling(3))])
    assert engine.head.num_rows >= 90 and max(map(max, rows)) <= head_model.MANY


def noted_lengths(engine):
    """How many rows are left each time that the head has followed."""
    lengths, follow = [], engine.head.follow

    def following():
        follow()
        lengths.append(sum(b.end - b.start for b in engine.head.backlogs.values()))

    engine.head.follow = following
    return lengths


def test_a_head_that_fails_between_steps_loses_none_of_the_targets_kv(target, head, monkeypatch):
    """Accepted guesses of a tree are moved by the next launch: it is the target's then."""
    cases = [Case(PROMPT[: 20 + i], sampling(60), arrives=i) for i in range(4)]
    texts = plain(target, cases)
    engine = engine_for(target, None, Scripted(hedge, dict(enumerate(texts))), head=head)
    fuse, calls = head.fuse, []

    def failing(aux_hidden_states):
        calls.append(len(aux_hidden_states))
        if len(calls) % 2:
            raise MemoryError
        return fuse(aux_hidden_states)

    monkeypatch.setattr(head, "fuse", failing)
    watch = Watch(engine)
    assert [r.token_ids.tolist() for r in watch.run(cases)] == texts
    assert watch.seen["moved"] and engine.stats.sources["eagle"].errors == len(calls[::2]) > 3


def test_a_head_that_fails_among_its_draft_tokens_loses_none_of_the_targets_kv(target, head):
    """Blocks that choices share are copied by the next launch."""
    cases = [Case(PROMPT[:n], sampling(12, 0.8, seed=n), n=4) for n in (37, 43)]
    options = {"min_gain": 0.0, "min_value": 0.0}
    engine = engine_for(target, None, "eagle", head=head, options=options)
    model, extend = engine.head, engine.head.extend

    def broken(items):
        found = extend(items)
        model.features = Broken()
        return found

    model.extend = broken
    watch = Watch(engine)
    assert [r.token_ids.tolist() for r in watch.run(cases)] == plain(target, cases)
    assert watch.seen["copied"] and engine.stats.sources["eagle"].errors > 5


class Broken:
    """Features that nobody can read."""

    device = torch.device("cpu")

    def __getitem__(self, rows):
        raise MemoryError

    def __len__(self):
        return 1


class Asks:
    """Runs a tree of fixed shape level by level, and compares every node with the oracle."""

    needs_executor = True

    def __init__(self, target, head, executor):
        self.target, self.head, self.executor, self.num_seen = target, head, executor, 0

    def propose(self, items):
        ready, logits = self.executor.extend(items)
        texts = {i: items[i].token_ids.tolist() for i in ready}
        for i, row in zip(ready, logits, strict=True):
            close(row, in_all(self.head, Oracle(self.target, self.head, texts[i]).logits))
        # The third node is below the first, and the fourth below the third of the same call.
        levels = [([11, 12], [ROOT, ROOT]), ([13, 14, 15], [1, 3, 2])]
        paths = [[11], [12], [11, 13], [11, 13, 14], [12, 15]]
        for number, (tokens, parents) in enumerate(levels):
            request_tries = [
                i for i in ready if number < items[i].id % 3
            ]  # of some requests one, or none
            fit, logits = self.executor.expand(
                [Nodes(items[i].id, tokens, parents) for i in request_tries]
            )
            rows = iter(logits)
            for place in fit:
                for path in paths[2 * number : 2 * number + len(tokens)]:
                    oracle = Oracle(self.target, self.head, texts[request_tries[place]])
                    want = [oracle.guess(token) for token in path][-1]
                    close(next(rows), in_all(self.head, want))
                    self.num_seen += 1
        trees = Draft([11, 12, 13, 14, 15], [0, 0, 1, 3, 2], [1, 2, 3, 4, 5])
        sizes = [(1, 2, 5)[item.id % 3] if i in ready else 0 for i, item in enumerate(items)]
        return [trees.head(min(n, x.limit)) for n, x in zip(sizes, items, strict=True)]

    def observe(self, id, draft, accepted):
        pass

    def forget(self, id):
        pass


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
@pytest.mark.parametrize("block_size", [16, 3])
def test_draft_tokens_in_a_batch_of_other_trees_have_the_logits_of_their_paths(
    pairs, kind, block_size
):
    target, head = pairs[kind]
    engine = engine_for(target, None, "ngram", head=head, block_size=block_size, max_nodes=8)
    asks = Asks(target, head, engine.head)
    engine.speculator = fixed(engine, asks)
    engine.speculator.draft_model = engine.head
    sizes = 5, 34, 50, 7, 19, 40, 82, 53
    cases = [Case(PROMPT[:n], sampling(6), arrives=i % 3) for i, n in enumerate(sizes)]
    got = Watch(engine).run(cases)
    assert asks.num_seen > 50
    assert not engine.stats.sources["scripted"].errors
    assert [r.token_ids.tolist() for r in got] == plain(target, cases)
