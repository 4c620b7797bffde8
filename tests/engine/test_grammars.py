"""Texts that obey a grammar: the same ones, whoever guesses."""

import json
import random
import re
import threading
from time import perf_counter

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from msgspec.structs import replace

from specserve.engine.admission import MOMENT
from specserve.engine.grammars import Grammars, Vocabulary
from specserve.exchange.messages import Caller
from specserve.exchange.sampling_params import ReasoningBudget, Sampling
from specserve.scheduling.grammar_state import GrammarState
from specserve.scheduling.request import NOTHING_LEFT
from specserve.text.grammars import compiled
from specserve.text.tokenizer import load_tokenizer
from tests.checkpoints import EOS, tiny_checkpoint
from tests.engine.engines import (
    Case,
    Scripted,
    Watch,
    ask_always,
    bush,
    draft_of,
    engine_for,
    hedge,
    load_small,
    plan_by_chance,
    wrong_later,
)

VOCAB = 320
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["circle", "square"]},
        "sides": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 8},
    },
    "required": ["kind", "sides"],
    "additionalProperties": False,
}
REGEX = "(yes|no), (it|she) (is|was)( not)? [a-f]{1,9}!"
CHOICE = ["the cat sat", "the cat sat on the mat", "a dog"]


def json_grammar(schema):
    options = {"whitespace_flexible": False}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


GRAMMARS = {
    "json": json_grammar(SCHEMA),
    "regex": LLMatcher.grammar_from_regex(REGEX),
    "choice": LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, CHOICE))}"),
}


def obeys(name, text):
    if name == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    return bool(re.fullmatch(REGEX, text)) if name == "regex" else text in CHOICE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=1)


@pytest.fixture(scope="module")
def pair(folder, tmp_path_factory):
    draft = tmp_path_factory.mktemp("models") / "draft"
    return load_small(folder), load_small(tiny_checkpoint(draft, seed=1, num_hidden_layers=1))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def end_of(tokenizer):
    return tokenizer.get_vocab()[EOS]


def read_vocabulary(tokenizer):
    ends = [end_of(tokenizer)]
    return Vocabulary(compiled.vocabulary_of(tokenizer, VOCAB, ends), VOCAB, ends)


@pytest.fixture(scope="module")
def end(tokenizer):
    return end_of(tokenizer)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return read_vocabulary(tokenizer)


@pytest.fixture
def engine_with(pair, vocabulary):
    def make(drafter="none", **settings):
        target, draft = pair
        grammars = Grammars(lambda: vocabulary)
        engine = engine_for(
            target, draft_of(draft, drafter), drafter, grammars=grammars, **settings
        )
        if drafter == "auto":
            ask_always(engine)
        return engine

    return make


@pytest.fixture
def sampling(end):
    def make(grammar, **given):
        defaults = {"max_tokens": 60, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        given = {"seed": 7, **defaults, **given}
        return Sampling(**given, stop_ids=frozenset([end]), grammar=grammar)

    return make


def run(engine, prompt, *samplings):
    """The outputs of requests that are asked at once, by what each has in the end."""
    requests = [engine.add(prompt, s) for s in samplings]
    failures = {}
    while not engine.is_idle:
        for output in engine.step():
            if output.failure:
                failures[output.id] = output.failure
    return [(r.token_ids.tolist()[len(prompt) :], failures.get(r.id, "")) for r in requests]


PROMPT = [5, 9, 30, 41, 7]


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_obeys_its_grammar(engine_with, sampling, tokenizer, end, name, temperature):
    for seed in range(4):
        asked = sampling(GRAMMARS[name], seed=seed, temperature=temperature, max_tokens=200)
        [(tokens, failure)] = run(engine_with(), PROMPT, asked)
        assert not failure and tokens[-1] == end
        assert obeys(name, tokenizer.decode(tokens[:-1]))


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("drafter", ["ngram", "model", "auto"])
def test_a_drafter_changes_no_text_that_a_grammar_rules(engine_with, sampling, name, drafter):
    asked = [
        sampling(GRAMMARS[name], seed=seed, temperature=t) for seed in range(3) for t in (0.0, 1.0)
    ]
    asked.append(sampling(""))
    expected = run(engine_with(max_nodes=0), PROMPT, *asked)
    engine = engine_with(drafter)
    assert run(engine, PROMPT, *asked) == expected
    assert engine.stats.num_drafted > 0 and (engine.stats.num_accepted > 0 or drafter == "ngram")


@pytest.mark.parametrize("script", [bush, hedge, wrong_later])
def test_the_same_with_draft_tokens_that_break_the_grammar(engine_with, sampling, script):
    asked = sampling(GRAMMARS["json"], seed=3)
    [(expected, _)] = run(engine_with(), PROMPT, asked)
    engine = engine_with(Scripted(script, {0: PROMPT + expected}))
    assert run(engine, PROMPT, asked) == [(expected, "")]
    assert engine.stats.num_accepted > 0


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_same_whatever_is_planned_and_disturbed(pair, vocabulary, end, data):
    names = [*GRAMMARS, None]
    cases = data.draw(
        st.lists(
            st.builds(
                lambda name, seed, t, size, arrives, leaves, n: Case(
                    [(size * 7 + i * 31) % 300 + 1 for i in range(size)],
                    Sampling(
                        max_tokens=40,
                        temperature=t,
                        top_k=0,
                        top_p=1.0,
                        min_p=0.0,
                        seed=seed,
                        stop_ids=frozenset([end]),
                        grammar=GRAMMARS[name] if name else "",
                    ),
                    arrives,
                    leaves,
                    n,
                ),
                st.sampled_from(names),
                st.integers(0, 99),
                st.sampled_from([0.0, 1.0]),
                st.sampled_from([1, 5, 40]),
                st.integers(0, 4),
                st.none() | st.integers(2, 9),
                st.integers(1, 3),
            ),
            min_size=1,
            max_size=3,
        )
    )
    target, draft = pair
    texts = []
    for drafter in ("none", "auto"):
        settings = {"max_running": 4, "grammars": Grammars(lambda: vocabulary)}
        engine = engine_for(target, draft_of(draft, drafter), drafter, **settings)
        if drafter == "auto":
            ask_always(engine)
            plan_by_chance(engine, data.draw(st.integers(0, 99)))
        events = (
            {}
            if drafter == "none"
            else data.draw(
                st.dictionaries(st.integers(1, 12), st.sampled_from(["preempt", "drop", "reset"]))
            )
        )
        requests = Watch(engine).run(cases, events)
        texts.append([r.token_ids.tolist() for r in requests])
    whole = [case.leaves is None or c < case.n - 1 for case in cases for c in range(case.n)]
    for is_whole, a, b in zip(whole, *texts, strict=True):
        shorter = min(len(a), len(b))
        assert a[:shorter] == b[:shorter] and (not is_whole or len(a) == len(b))


@pytest.mark.parametrize("drafter", ["auto", "model", "scripted"])
def test_no_draft_that_is_verified_breaks_the_grammar(
    engine_with, sampling, vocabulary, end, drafter
):
    if drafter == "scripted":
        texts = [run(engine_with(), PROMPT, sampling(GRAMMARS["json"], seed=s)) for s in range(3)]
        drafter = Scripted(hedge, {seed: text for seed, [(text, _)] in enumerate(texts)})
    engine = engine_with(drafter)
    matcher = compiled.compile_grammar(vocabulary.tokens, GRAMMARS["json"])
    seen = 0
    build = engine.build

    def checked(scheduled, sampled):
        nonlocal seen
        for item in sampled:
            paths = [[]]
            known = item.request.token_ids.tolist()[item.request.num_prompt :]
            for token, parent in zip(item.draft.tokens, item.draft.parents, strict=True):
                paths.append([*paths[parent], token])
                text = [*known, *paths[-1]]
                if text[-1] == end:
                    text.pop()
                assert matcher.deep_copy().try_consume_tokens(text) == len(text)
                seen += 1
        return build(scheduled, sampled)

    engine.build = checked
    run(engine, PROMPT, *(sampling(GRAMMARS["json"], seed=seed) for seed in range(3)))
    assert seen > 20


def test_what_a_grammar_forces_is_drafted_by_it(engine_with, sampling):
    engine = engine_with("auto", options={"sources": ["grammar"]})
    run(engine, PROMPT, sampling(GRAMMARS["json"], max_tokens=100))
    sums = engine.stats.sources["grammar"]
    assert sums.accepted_at[0] > 0 and sums.accepted == sum(sums.accepted_at) > 5
    assert engine.sources == ("grammar",)


def test_masks_are_found_only_of_rows_that_are_read(engine_with, sampling, monkeypatch):
    asked = sampling(GRAMMARS["json"], seed=3)
    [(expected, _)] = run(engine_with(), PROMPT, asked)
    found = []
    engine = engine_with(Scripted(hedge, {0: expected}))
    mask = compiled_mask(monkeypatch, found)
    run(engine, PROMPT, asked)
    assert mask and len(found) == len(expected)  # one for each token, though more were guessed
    assert engine.stats.num_drafted > engine.stats.num_accepted


def compiled_mask(monkeypatch, found):
    mask = GrammarState.mask

    def counted(self, path):
        found.append(path)
        return mask(self, path)

    monkeypatch.setattr(GrammarState, "mask", counted)
    return mask


@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_where_no_token_is_left_the_request_ends_and_no_other(
    engine_with, sampling, tokenizer, drafter
):
    ids = tuple(tokenizer.get_vocab()[c] for c in "abcdef!,yesno" if c in tokenizer.get_vocab())
    dead = sampling(GRAMMARS["regex"], allowed_ids=ids)  # no space
    good = sampling(GRAMMARS["regex"])
    [(expected, _)] = run(engine_with(), PROMPT, good)
    (tokens, failure), other = run(engine_with(drafter), PROMPT, dead, good)
    assert failure == NOTHING_LEFT and tokenizer.decode(tokens) in ("yes,", "no,")
    assert other == (expected, "")


def test_an_end_that_would_be_too_early_is_no_end(engine_with, sampling):
    asked = sampling(GRAMMARS["choice"], min_tokens=50)
    [(tokens, failure)] = run(engine_with(), PROMPT, asked)
    assert failure == NOTHING_LEFT and tokens


def test_a_text_that_breaks_off_does_so_at_the_same_token(engine_with, sampling, tokenizer):
    """However many guesses were accepted in the step before."""
    free = sampling(GRAMMARS["regex"])
    [(truth, _)] = run(engine_with(), PROMPT, free)
    lacking = tuple(set(range(VOCAB)) - set(truth[6:7]))
    asked = replace(free, allowed_ids=lacking, temperature=0.0)
    expected = run(engine_with(), PROMPT, asked)
    engine = engine_with(Scripted(wrong_later, {0: [*expected[0][0], *truth[6:]]}))
    assert run(engine, PROMPT, asked) == expected


def test_a_grammar_is_compiled_once_for_each_tenant(engine_with, sampling):
    engine, asked = engine_with(), sampling(GRAMMARS["choice"])
    for call, tenant in enumerate((0, 1, 1, 0)):
        engine.add_choices(PROMPT, [asked], caller=Caller(call, tenant))
    assert len(engine.grammars.compiled) == 2


def test_steps_go_on_while_a_grammar_is_compiled(engine_with, sampling, monkeypatch):
    engine, go = engine_with(), threading.Event()
    compile_grammar = compiled.compile_grammar

    def slow(*args):
        go.wait(10)
        return compile_grammar(*args)

    monkeypatch.setattr("specserve.text.grammars.compiled.compile_grammar", slow)
    late = engine.add(PROMPT, sampling(GRAMMARS["choice"]))
    good = engine.add(PROMPT, sampling("", max_tokens=5))
    while good.id in engine.requests:
        engine.step()
    assert late.num_output == 0 and not engine.is_idle
    start = perf_counter()
    engine.step()
    assert perf_counter() - start > MOMENT / 2, "no step spins while there is nothing to do"
    go.set()
    while not engine.is_idle:
        engine.step()
    assert late.num_output > 0


@pytest.fixture
def held_up(monkeypatch):
    """An event until which grammars with this mark are not compiled."""
    go, compile_grammar = threading.Event(), compiled.compile_grammar

    def slow(vocabulary, grammar):
        if "held" in grammar:
            go.wait(10)
        return compile_grammar(vocabulary, grammar)

    monkeypatch.setattr("specserve.text.grammars.compiled.compile_grammar", slow)
    yield go
    go.set()


def held(number):
    return LLMatcher.grammar_from_regex(f"held {number}")


def test_grammars_of_one_tenant_hold_up_no_other_tenant(engine_with, sampling, held_up):
    engine = engine_with()
    many = [
        engine.add_choices(PROMPT, [sampling(held(n))], caller=Caller(n, tenant=1))[0]
        for n in range(5)
    ]
    asked = [sampling(GRAMMARS["choice"])]
    [other] = engine.add_choices(PROMPT, asked, caller=Caller(9, tenant=2))
    while other.id in engine.requests:
        engine.step()
    assert other.num_output > 0 and not any(request.num_output for request in many)
    held_up.set()
    while not engine.is_idle:
        engine.step()
    assert all(request.num_output for request in many)


def test_a_grammar_that_no_request_waits_for_is_not_compiled(engine_with, sampling, held_up):
    engine = engine_with()
    requests = [engine.add(PROMPT, sampling(held(n))) for n in (0, 1, 2, 1)]
    for gone in requests[1:3]:
        engine.finish(gone.id)
    engine.step()
    kept = [grammar for _, _, grammar in engine.grammars.compiled]
    assert kept == [held(0), held(1)]
    held_up.set()
    while not engine.is_idle:
        engine.step()
    assert requests[3].num_output > 0


def test_the_tenant_with_most_grammars_loses_its_oldest_one(engine_with, sampling, monkeypatch):
    monkeypatch.setattr("specserve.engine.grammars.KEPT", 4)
    engine = engine_with()
    for tenant, number in [(1, 0), (2, 1), (2, 2), (2, 3), (2, 4), (2, 5)]:
        asked = [sampling(LLMatcher.grammar_from_regex(f"a{number}"))]
        engine.add_choices(PROMPT, asked, caller=Caller(number, tenant))
        while not engine.is_idle:
            engine.step()
    assert [tenant for tenant, _, _ in engine.grammars.compiled] == [1, 2, 2, 2]
    assert LLMatcher.grammar_from_regex("a5") in {g for _, _, g in engine.grammars.compiled}


def test_requests_may_end_while_their_grammar_is_compiled(engine_with, sampling, monkeypatch):
    engine, go = engine_with(), threading.Event()
    compile_grammar = compiled.compile_grammar

    def slow(*args):
        go.wait(10)
        return compile_grammar(*args)

    monkeypatch.setattr("specserve.text.grammars.compiled.compile_grammar", slow)
    gone = engine.add(PROMPT, sampling(GRAMMARS["json"]))
    asked = [sampling(GRAMMARS["choice"], seed=seed) for seed in range(3)]
    first, second, third = engine.add_choices(PROMPT, asked)
    engine.finish(gone.id)
    engine.step()
    engine.finish(first.id)  # the leader of the others
    engine.step()
    go.set()
    while not engine.is_idle:
        engine.step()
        engine.check()
    assert gone.num_output == first.num_output == 0
    alone = [tokens for tokens, _ in run(engine_with(), PROMPT, *asked[1:])]
    assert [r.token_ids.tolist()[len(PROMPT) :] for r in (second, third)] == alone


def test_choices_obey_their_grammar_where_the_first_ends_before_its_first_token(
    engine_with, sampling
):
    asked = [sampling(GRAMMARS["choice"], seed=seed) for seed in range(3)]
    prompt = [*PROMPT] * 8
    alone = [tokens for tokens, _ in run(engine_with(), prompt, *asked[1:])]
    engine = engine_with("auto", max_batched_tokens=16, prefill_chunk=16, max_running=8)
    first, *others = engine.add_choices(prompt, asked)
    while first.num_computed == 0:
        engine.step()
    assert first.num_output == 0
    engine.finish(first.id)
    while not engine.is_idle:
        engine.step()
        engine.check()
    assert [r.token_ids.tolist()[len(prompt) :] for r in others] == alone


def test_a_grammar_that_is_none_ends_its_request_alone(engine_with, sampling):
    (tokens, failure), (good, none) = run(
        engine_with(), PROMPT, sampling("start: nothing_of_this_name"), sampling("", max_tokens=4)
    )
    assert not tokens and "the grammar: " in failure and "nothing_of_this_name" in failure
    assert good and not none


def test_a_draft_model_is_asked_for_what_may_come_alone(engine_with, sampling, vocabulary):
    engine = engine_with("model")
    grammar = GRAMMARS["json"]
    extend, expand, seen = engine.draft_model.extend, engine.draft_model.expand, []

    def check(logits, paths):
        for row, text in zip(logits, paths, strict=True):
            matcher = compiled.compile_grammar(vocabulary.tokens, grammar)
            if matcher.try_consume_tokens(text) == len(text):  # it goes on after the end, too
                bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                allowed = np.unpackbits(bits, bitorder="little")[:VOCAB].astype(bool)
                assert (row.isfinite().numpy() == allowed).all()
                seen.append(text)

    def known(item):
        return item.token_ids.tolist()[len(PROMPT) :]

    def extended(items):
        ready, logits = extend(items)
        check(logits, [known(items[i]) for i in ready])
        extended.texts = {items[i].id: [known(items[i])] for i in ready}
        return ready, logits

    def expanded(nodes):
        fit, logits = expand(nodes)
        new = []
        for id, tokens, parents in (nodes[i] for i in fit):
            texts = extended.texts[id]
            for token, parent in zip(tokens, parents, strict=True):
                texts.append([*texts[parent], token])
                new.append(texts[-1])
        check(logits, new)
        return fit, logits

    engine.draft_model.extend, engine.draft_model.expand = extended, expanded
    run(engine, PROMPT, sampling(grammar), sampling(grammar, seed=2))
    assert len(seen) > 40


def test_whatever_goes_wrong_in_compiling_ends_its_request_alone(
    engine_with, sampling, monkeypatch
):
    def failing(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("specserve.text.grammars.compiled.compile_grammar", failing)
    (tokens, failure), (good, none) = run(
        engine_with(), PROMPT, sampling(GRAMMARS["json"]), sampling("", max_tokens=4)
    )
    assert not tokens and "can't start new thread" in failure
    assert good and not none


class Fragile:
    """A compiled grammar whose matchers run into a limit after a text."""

    def __init__(self, matcher, limit):
        self.matcher, self.limit, self.number = matcher, limit, 0

    def copy(self):
        return FragileMatcher(self.matcher.deep_copy(), self.limit), self.number

    def renew(self, number):
        self.number += 1
        return True


class FragileMatcher:
    """It cannot be undone after it has run into the limit."""

    def __init__(self, matcher, limit):
        self.matcher, self.limit, self.has_failed = matcher, limit, False
        self.text = []

    def try_consume_tokens(self, tokens):
        n = 0 if self.has_failed else self.matcher.try_consume_tokens(tokens)
        self.text += tokens[:n]
        return n

    def rollback(self, n):
        assert not self.has_failed
        del self.text[len(self.text) - n :]
        return self.matcher.rollback(n)

    def compute_bitmask(self):
        self.has_failed |= self.text == self.limit
        return self.matcher.compute_bitmask()

    def is_error(self):
        return self.has_failed

    def get_error(self):
        return "too much"

    def __getattr__(self, name):
        return getattr(self.matcher, name)


def test_what_a_draft_runs_into_does_not_change_the_text(tokenizer, vocabulary, end):
    choice = compiled.Compiled(vocabulary.tokens, GRAMMARS["choice"])
    the, a = (tokenizer.encode(text, False) for text in ("the", "a d"))
    state = GrammarState(Fragile(choice.first, the), [end], VOCAB)
    sound = GrammarState(choice, [end], VOCAB)
    assert not state.mask(the).any() and not state.error
    assert (state.mask(a) == sound.mask(a)).all()
    assert (state.mask(()) == sound.mask(())).all()
    state.matcher.has_failed = True  # by all that it has seen: another one need not fail
    assert state.forced(()) == sound.forced(()) and (state.mask(()) == sound.mask(())).all()
    state.extend(the)
    assert not state.mask(()).any() and state.error == "too much"


def ids_in(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def few_states(most):
    return lambda room=1: LLParserLimits(max_lexer_states=most)


def test_no_request_fills_the_automaton_of_its_grammar_for_others(
    tokenizer, vocabulary, end, monkeypatch
):
    monkeypatch.setattr(compiled, "limits", few_states(500))
    texts = ["".join(random.Random(i).choices("abcdef", k=30)) for i in range(60)]
    grammar = LLMatcher.grammar_from_regex("|".join(texts))
    one = compiled.Compiled(vocabulary.tokens, grammar)
    for text in texts:
        state = GrammarState(one, [end], VOCAB)
        for token in tokenizer.encode(text, False):
            assert state.mask(()).any(), f"{text}: {state.error}"
            state.extend([token])
    assert one.number > 0, "the automaton was never full"


@pytest.mark.parametrize("num_guesses", [0, 2, 4])
def test_looking_at_draft_tokens_ends_no_text(tokenizer, vocabulary, end, num_guesses, monkeypatch):
    """The automaton of this expression doubles with each character that may be its end."""
    monkeypatch.setattr(compiled, "limits", few_states(600))
    grammar = LLMatcher.grammar_from_regex(r"(.|\n)*(a|e).{60}b")
    one, chance = compiled.Compiled(vocabulary.tokens, grammar), random.Random(0)
    state = GrammarState(one, [end], VOCAB)
    for token in tokenizer.encode("the cat sat on the mat and a dog ate its hat; " * 4, False)[
        :160
    ]:
        path = []
        for _ in range(num_guesses):
            found = [i for i in ids_in(state.mask(path)).tolist() if i != end]
            if not found:
                break
            path.append(chance.choice(found))
        assert state.mask(()).any(), state.error
        state.extend([token])


def test_draft_tokens_that_take_too_long_are_looked_at_no_more_and_the_text_goes_on(
    vocabulary, end
):
    state = GrammarState(compiled.Compiled(vocabulary.tokens, GRAMMARS["regex"]), [end], VOCAB)
    first = ids_in(state.mask(())).tolist()[0]
    assert state.mask([first]).any()
    state.patience_with_drafts = 0.0
    assert not state.mask([first]).any() and not state.allows([first], first)
    sound = GrammarState(state.compiled, [end], VOCAB)
    for _ in range(8):
        assert (state.mask(()) == sound.mask(())).all() and not state.why
        token = ids_in(sound.mask(())).tolist()[0]
        state.extend([token])
        sound.extend([token])


def test_a_grammar_that_takes_long_to_compile_is_compiled_once(vocabulary, monkeypatch):
    monkeypatch.setattr(compiled, "LONG", 0.0)
    one = compiled.Compiled(vocabulary.tokens, GRAMMARS["regex"])
    assert not one.renew(0) and one.copy()[1] == 0


def test_a_budget_of_reasoning_waits_for_the_end_of_a_character(engine_with, sampling, tokenizer):
    """The grammar would allow no end of the reasoning after the first byte of a letter."""
    grammar = LLMatcher.grammar_from_regex("[éè]{2,20}![a-f]{3}")
    opening, [closing] = 310, tokenizer.encode("!", add_special_tokens=False)
    budget = ReasoningBudget(3, (opening,), (closing,))
    cases = [
        Case([5, 9, 9, 5, opening], sampling(grammar, seed=seed, reasoning=budget))
        for seed in range(12)
    ]
    texts = set()
    for drafter in ("none", "ngram", "model", "auto"):
        requests = Watch(engine_with(drafter)).run(cases)
        texts.add(tuple(tokenizer.decode(r.output.tolist()) for r in requests))
    [each] = texts
    assert all(re.match("[éè]{2}![a-f]{3}", text) for text in each)
