"""Who guesses, changed while requests run: their texts stay, and nothing is lost or left."""

import gc
import random
import shutil
import threading
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from specserve import LLM, SamplingParams
from specserve.engine.loading import load_models
from specserve.errors import ConfigError
from tests.checkpoints import tiny_checkpoint, with_another_token
from tests.engine.engines import let_all_guess
from tests.models.eagle_heads import write_head

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 25, "scheduler.max_running": 8}
SOURCES = ["ngram", "model", "grammar", "prediction", "suffix"]
WIDE = {"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 64}
PROMPTS = ["the cat sat on the mat", "def read(path):", "with open(path)", "a b c a b c a b"]
KINDS = [
    {"temperature": 0},
    {"temperature": 1, "seed": 7},
    {"temperature": 1, "seed": 8, "n": 2},
    {"temperature": 0.8, "seed": 9, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1, "seed": 1, "prediction": "the cat sat on the mat and the cat sat"},
    {"temperature": 0, "structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{3,9}){6,9}"}},
    {"temperature": 1, "seed": 3, "return_speculation_details": True},
    {"temperature": 1, "seed": 4, "cache_salt": "other", "logprobs": 2},
]
ASKED = [
    (PROMPTS[i % 4], SamplingParams(max_tokens=48 + 4 * i, **kind)) for i, kind in enumerate(KINDS)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    make = tmp_path_factory.mktemp
    head = make("heads") / "head"
    write_head(head, eagle_aux_hidden_state_layer_ids=[0, 1])
    return {
        "head": head,
        "target": tiny_checkpoint(make("target"), seed=1),
        "same": tiny_checkpoint(make("same"), seed=1),
        "wide": tiny_checkpoint(make("wide"), seed=2, **WIDE),
        "words": with_another_token(tiny_checkpoint(make("words"), seed=2)),
    }


def load(folders, **settings):
    return LLM(folders["target"], set=SETTINGS | settings, progress=False)


@pytest.fixture
def eager(monkeypatch):
    let_all_guess(monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(folders):
    with load(folders, **{"drafter.name": "none"}) as llm:
        return texts(llm, lambda: None)


def texts(llm, between):
    """The tokens of every choice, with something done between steps."""
    generations = []
    for prompt, params in ASKED:
        ids, params = llm.check(prompt, params)
        generations += llm.start(ids, params)
    while not all(generation.is_done for generation in generations):
        between()
        llm.step()
        llm.engine.check()
    return [generation.token_ids for generation in generations]


def some_change(llm, chance, folders):
    of_head = [] if llm.engine.head is None else ["eagle"]
    sources = chance.sample([*SOURCES, *of_head], chance.randint(1, 5))
    drafters = ["none", "ngram", "model", *of_head]
    return chance.choice(
        [
            lambda: llm.change_speculation(drafter="auto", sources=sources),
            lambda: llm.change_speculation(max_nodes=chance.choice([1, 4, 16, 63])),
            lambda: llm.change_speculation(max_step_nodes=chance.choice([2, 32, 256])),
            lambda: llm.change_speculation(options={"max_depth": chance.choice([1, 4, None])}),
            lambda: llm.change_speculation(drafter=chance.choice(drafters)),
            lambda: llm.load_draft_model(folders[chance.choice(["same", "wide"])]),
            lambda: llm.load_draft_model(folders["words"]),
            llm.unload_draft_model,
        ]
    )


@pytest.mark.parametrize("parts", [["model"], ["model", "head"]], ids=" ".join)
@pytest.mark.parametrize("seed", range(6))
def test_requests_keep_their_texts_whatever_changes_between_their_steps(
    folders, undisturbed, eager, seed, parts
):
    chance, changes, refused = random.Random(seed), [], []
    paths = {"model": folders["wide"], "head": folders["head"]}
    with load(folders, **{f"drafter.{part}": str(paths[part]) for part in parts}) as llm:

        def change():
            if chance.random() < 0.4:
                try:
                    some_change(llm, chance, folders)()
                    changes.append(1)
                except ConfigError as e:
                    refused.append(str(e))

        assert texts(llm, change) == undisturbed
        assert len(changes) > 5 and len(refused) > 0 and llm.engine.pool.is_whole
        assert llm.engine.stats.num_accepted > 0 and llm.engine.stats.drafter_errors == 0


def test_a_draft_model_that_comes_to_running_requests_draft_tokens_for_them(folders, eager):
    with load(folders, **{"drafter.options.sources": ["ngram"]}) as llm:
        [generation] = llm.start(
            *llm.check("the cat sat", SamplingParams(max_tokens=60, ignore_eos=True))
        )
        for _ in range(5):
            llm.step()
        llm.load_draft_model(folders["same"])
        assert llm.engine.sources == ("ngram", "model")
        while not generation.is_done:
            llm.step()
        assert llm.engine.stats.sources["model"].accepted > 3
        assert llm.engine.pool.holders()["draft"] == 0


def test_a_draft_model_that_goes_gives_back_its_blocks_and_its_weights(folders, eager):
    with load(folders, **{"drafter.model": str(folders["same"])}) as llm:
        [generation] = llm.start(
            *llm.check("the cat sat", SamplingParams(max_tokens=200, ignore_eos=True))
        )
        while llm.memory()["draft"] == 0:
            llm.step()
        llm.unload_draft_model()
        assert llm.memory()["draft"] == 0 and llm.weights.draft is None
        assert llm.engine.draft_model is None
        assert llm.engine.sources == ("ngram", "grammar", "prediction")
        llm.end([generation])
        with pytest.raises(ConfigError, match="'model' needs a draft model"):
            llm.change_speculation(sources=["model", "ngram"])


def test_nothing_of_a_draft_model_is_left_when_another_one_comes(folders, eager):
    settings = {"drafter.model": str(folders["same"]), "drafter.options.sources": ["model"]}
    asked = SamplingParams(max_tokens=300, ignore_eos=True, temperature=1.5, seed=1)
    with load(folders, **settings | {"drafter.options.width": 4}) as llm:
        pool, arena = llm.engine.pool, llm.engine.target.arena
        llm.generate("the cat sat on the mat", asked)
        assert "draft" in {pool.owners[block] for block in pool.cached}
        [generation] = llm.start(*llm.check("def read(path):", asked))
        while not llm.memory()["draft"]:
            llm.step()
        pool.updates.move("draft", [(0, 1)])  # as of a guess that was accepted in the last step
        learned = llm.engine.speculator.acceptance.every[0]
        assert learned.counts()["model"]
        llm.load_draft_model(folders["wide"])
        assert not pool.updates.moves and "model" not in learned.counts()
        assert "draft" not in {pool.owners[block] for block in pool.cached}
        assert arena.views["draft"] is llm.engine.draft_model.runner.kv
        llm.end([generation])


def test_a_draft_model_is_refused_while_requests_hold_the_blocks_that_it_needs(folders):
    with load(folders) as llm:
        pool = llm.engine.pool
        held = pool.try_allocate(pool.num_available)
        with pytest.raises(ConfigError, match="running requests hold the KV blocks"):
            llm.load_draft_model(folders["same"])
        assert llm.engine.draft_model is None
        pool.release(held)
        llm.load_draft_model(folders["same"])
        assert llm.engine.draft_model is not None


def test_sources_that_come_draft_for_requests_that_run(folders, eager):
    asked = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    regex = {"regex": "(the cat sat on the mat ){9,12}"}
    with load(folders, **{"drafter.options.sources": ["ngram"]}) as llm:
        text = llm.generate("the cat", asked)[0].text
        expecting = replace(asked, prediction=text)
        formed = replace(asked, structured_outputs=regex, ignore_eos=False)
        [generation] = llm.start(*llm.check("the cat", formed))
        while not generation.token_ids:  # its grammar is compiled
            llm.step()
        llm.start(*llm.check("the cat", expecting))
        llm.step()
        llm.change_speculation(sources=["prediction", "grammar"])
        while not llm.engine.is_idle:
            llm.step()
        sums = llm.engine.stats.sources
        assert sums["prediction"].verified > 5 and sums["grammar"].verified > 5


def test_limits_hold_from_the_next_step_on(folders, eager):
    asked = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    with load(folders, **{"drafter.model": str(folders["same"])}) as llm:
        llm.change_speculation(drafter="model")
        before = llm.engine.stats.num_drafted
        [generation] = llm.start(*llm.check("the cat", asked))
        for most in (4, 3, 1, 0):
            llm.change_speculation(max_nodes=most)
            drafted = []
            for _ in range(4):
                llm.step()
                drafted.append(llm.engine.stats.num_drafted - before)
                before = llm.engine.stats.num_drafted
            assert max(drafted) == most
        llm.end([generation])


def test_a_draft_model_is_removed_only_where_something_else_can_guess(folders):
    with load(folders, **{"drafter.model": str(folders["same"])}) as llm:
        for change in ({"sources": ["model"]}, {"drafter": "model"}):
            llm.change_speculation(**change)
            with pytest.raises(ConfigError, match="needs its draft model"):
                llm.unload_draft_model()
            assert llm.engine.draft_model is not None
        llm.change_speculation(drafter="none")
        assert llm.engine.draft_model is None
        llm.unload_draft_model()  # it is not kept in mind either
        llm.change_speculation(drafter="auto")
        assert llm.engine.draft_model is None


def test_sources_that_stay_know_what_they_knew(folders, eager):
    asked = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with load(folders, **{"drafter.options.sources": ["suffix"]}) as llm:
        llm.generate("the cat", asked)
        llm.change_speculation(sources=["suffix", "ngram"])
        before = llm.engine.stats.sources["suffix"].accepted
        llm.generate("the cat", asked)
        assert llm.engine.stats.sources["suffix"].accepted > before == 0
        llm.change_speculation(sources=["ngram"])
        llm.change_speculation(sources=["ngram", "suffix"])
        suffix = llm.engine.speculator.sources[-1]
        assert suffix.name == "suffix" and not suffix.scopes, "who is gone has forgotten"


def test_bits_of_sources_in_details_never_change_their_meaning(folders, eager):
    with load(folders, **{"drafter.options.sources": ["ngram"]}) as llm:
        llm.change_speculation(sources=["suffix"])
        llm.change_speculation(sources=["prediction", "ngram"])
        assert llm.engine.sources == ("prediction", "ngram")
        assert llm.engine.known_sources == ("ngram", "suffix", "prediction")
        params = SamplingParams(
            max_tokens=20, temperature=0, return_speculation_details=True, prediction="a a a a a"
        )
        [output] = llm.generate("a b c a b c a b c", params)
        bits = {bit for step in output.speculation.details for bit in step.tree.sources}
        assert bits and bits <= {1, 4, 5}


REFUSED = {
    "a folder that is not there": (lambda llm, f: llm.load_draft_model("/no/such"), "no/such"),
    "another vocabulary": (
        lambda llm, f: llm.load_draft_model(f["words"]),
        r"tokenizer differs from the target's, first at the token '<\|think\|>' \(300 there, None",
    ),
    "a source that is unknown": (
        lambda llm, f: llm.change_speculation(sources=["fortune"]),
        "unknown drafter or source 'fortune'",
    ),
    "a source by another engine's name": (
        lambda llm, f: llm.change_speculation(sources=["ngram", "eagle3"]),
        r"'eagle3'.* use 'eagle' for EAGLE-3 and MTP heads",
    ),
    "a drafter by another engine's name": (
        lambda llm, f: llm.change_speculation(drafter="mtp"),
        r"'mtp'.* use 'eagle' for EAGLE-3 and MTP heads",
    ),
    "a source twice": (lambda llm, f: llm.change_speculation(sources=["ngram"] * 2), "twice"),
    "no source": (lambda llm, f: llm.change_speculation(sources=[]), "length >= 1"),
    "a drafter that is unknown": (lambda llm, f: llm.change_speculation(drafter="x"), "'x'"),
    "code": (lambda llm, f: llm.change_speculation(drafter="os:system"), "loaded at start-up"),
    "a module": (lambda llm, f: llm.change_speculation(drafter="this"), "loaded at start-up"),
    "an option while nobody guesses": (
        lambda llm, f: llm.change_speculation(max_nodes=0, options={"bogus": 1}),
        "bogus",
    ),
    "an option of nobody": (
        lambda llm, f: llm.change_speculation(drafter="none", options={"width": 1}),
        "drafter none has no options",
    ),
    "a source that is no list": (
        lambda llm, f: llm.change_speculation(sources="ngram"),
        "sources",
    ),
    "options that are none": (lambda llm, f: llm.change_speculation(options=3), "options"),
    "code as a source": (
        lambda llm, f: llm.change_speculation(sources=["os:path"]),
        "unknown drafter",
    ),
    "an option": (lambda llm, f: llm.change_speculation(options={"depth": 1}), "depth"),
    "sources as an option": (
        lambda llm, f: llm.change_speculation(options={"sources": ["ngram"]}),
        "Move it out of options",
    ),
    "sources of another drafter": (
        lambda llm, f: llm.change_speculation(drafter="ngram", sources=["ngram"]),
        "only drafter auto",
    ),
    "too many guesses": (lambda llm, f: llm.change_speculation(max_nodes=64), "<= 63"),
    "a number that is none": (lambda llm, f: llm.change_speculation(max_nodes="4"), "max_nodes"),
    "a drafter without its draft model": (
        lambda llm, f: llm.change_speculation(drafter="model"),
        "needs a draft model",
    ),
    "rounding": (lambda llm, f: llm.load_draft_model(f["same"], "w3"), "quantize"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_and_changes_nothing(folders, name):
    ask, why = REFUSED[name]
    with load(folders) as llm:
        engine = llm.engine
        state = (
            engine.speculator,
            engine.draft_model,
            engine.scheduler.budget,
            llm.speculation_control.config,
        )
        with pytest.raises(ConfigError, match=why):
            ask(llm, folders)
        now = (
            engine.speculator,
            engine.draft_model,
            engine.scheduler.budget,
            llm.speculation_control.config,
        )
        assert now == state
        assert (
            len(llm.generate("the cat", SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids)
            == 9
        )


def test_the_targets_prefix_cache_is_of_use_after_any_change(folders):
    prompt, asked = [5, 6, 7, 8] * 20, SamplingParams(max_tokens=2)
    with load(folders) as llm:
        llm.generate(prompt, asked)
        llm.load_draft_model(folders["same"], "w8")
        [output] = llm.generate(prompt, asked)
        assert output.usage.cached_tokens == 79


def test_a_broken_draft_model_is_an_error_to_who_asked_for_it_alone(folders, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folders["same"], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with load(folders) as llm:
        [generation] = llm.start(
            *llm.check("the cat sat", SamplingParams(max_tokens=30, ignore_eos=True))
        )
        llm.step()
        with pytest.raises(ConfigError):
            llm.load_draft_model(broken)
        while not generation.is_done:
            llm.step()
        assert len(generation.token_ids) == 30 and llm.engine.draft_model is None


def test_a_draft_model_whose_kv_does_not_fit_into_a_block_is_refused(folders, tmp_path):
    large = tiny_checkpoint(tmp_path, seed=2, num_hidden_layers=8, head_dim=64)
    with load(folders, **{"memory.block_size": 1}) as llm:
        with pytest.raises(ConfigError, match="a larger memory"):
            llm.load_draft_model(large)
        assert llm.engine.draft_model is None and "draft" not in llm.engine.target.arena.views


def test_draft_models_that_come_and_go_leave_no_memory_behind(folders):
    def held():
        gc.collect()
        return psutil.Process().memory_info().rss / 2**20

    with load(folders) as llm:
        for _ in range(5):
            llm.load_draft_model(folders["wide"])
            llm.unload_draft_model()
        before = held()
        for _ in range(40):
            llm.load_draft_model(folders["wide"])
            llm.generate("the cat", SamplingParams(max_tokens=8))
            llm.unload_draft_model()
        assert held() - before < 8, "40 draft models have 60 MiB"


def test_a_draft_model_is_loaded_while_requests_step(folders, undisturbed, monkeypatch):
    loading, go = threading.Event(), threading.Event()

    def slow(*args):
        loading.set()
        assert go.wait(30)
        return load_models(*args)

    with load(folders) as llm:
        monkeypatch.setattr("specserve.engine.process.load_models", slow)
        thread = threading.Thread(target=llm.load_draft_model, args=(Path(folders["same"]),))
        thread.start()
        assert loading.wait(30)
        assert texts(llm, lambda: None) == undisturbed
        go.set()
        thread.join()
        assert "model" in llm.engine.sources


def test_a_grammar_of_a_request_that_ends_after_a_change_is_forgotten(folders):
    """Its request begins anew with the change, and may have no step after it."""
    asked = SamplingParams(max_tokens=40, structured_outputs={"regex": "(ab)+c"})
    with load(folders, **{"drafter.options.sources": ["ngram", "grammar"]}) as llm:
        stream = llm.stream("the cat", asked)
        grammar = llm.engine.speculator.sources[-1]
        while not grammar.rules:
            next(stream)
        assert grammar.name == "grammar" and grammar.rules
        llm.change_speculation(sources=["grammar", "ngram"])
        assert grammar in llm.engine.speculator.sources and grammar.rules
        stream.close()
        assert llm.engine.is_idle and not grammar.rules and not llm.engine.speculator.served
