"""Grammars are compiled in processes of their own: whatever one does, others are checked."""

import asyncio
import mmap
import os
import signal

import pytest

from specserve.errors import RequestError
from specserve.grammars.asked import StructuredOutputsParams, grammar_of
from specserve.server.bounded_process import address_space
from specserve.server.grammar_process import Tokens
from specserve.server.processes import GrammarProcesses
from tests.checkpoints import EOS, tiny_tokenizer
from tests.grammars.hostile import ENDLESS, EVERY

FIELD = "structured_outputs.json"


def grammar(**asked):
    return grammar_of(StructuredOutputsParams(**asked))


GOOD = grammar(regex="[ab]{3}")
STUCK = [grammar(**EVERY[name]) for name in sorted(ENDLESS)]


def with_grammars(folder, test):
    async def run():
        end = tiny_tokenizer().convert_tokens_to_ids(EOS)
        grammars = GrammarProcesses(Tokens(str(folder), 320, (end,)))
        try:
            await grammars.check(GOOD, FIELD, "")
            await test(grammars)
        finally:
            await grammars.close()

    asyncio.run(run())


async def refusal(grammars, grammar, salt=""):
    with pytest.raises(RequestError) as e:
        await grammars.check(grammar, FIELD, salt)
    assert e.value.param == FIELD
    return str(e.value)


def test_one_that_takes_too_long_delays_no_other_and_is_refused_at_its_deadline(folder):
    async def test(grammars):
        stuck = asyncio.create_task(refusal(grammars, STUCK[0]))
        await asyncio.sleep(0)
        for n in range(1, 9):
            await grammars.check(grammar(regex=f"a{{{n}}}"), FIELD, "")
        assert not stuck.done() and len(grammars.processes) == 2
        assert "takes more than 0.8 s to compile" in await stuck
        assert "takes more than 0.8 s to compile" in await refusal(grammars, STUCK[1])
        await grammars.check(grammar(regex="b"), FIELD, "")

    with_grammars(folder, test)


def test_another_process_starts_as_soon_as_one_is_used_and_as_soon_as_one_is_killed(folder):
    async def test(grammars):
        for n in range(1, 5):
            await grammars.check(grammar(regex=f"a{{{n}}}"), FIELD, "")
        assert len(grammars.processes) == 2
        before = {*grammars.processes}
        await refusal(grammars, STUCK[0])
        (new,) = {*grammars.processes} - before
        assert not new.has_ended

    with_grammars(folder, test)


def test_the_first_starts_soon_after_the_server_or_when_it_is_needed(folder, monkeypatch):
    monkeypatch.setattr("specserve.server.processes.SOON", 0.05)
    end = tiny_tokenizer().convert_tokens_to_ids(EOS)

    async def run():
        grammars = GrammarProcesses(Tokens(str(folder), 320, (end,)))
        assert not grammars.processes
        await asyncio.sleep(0.1)
        assert len(grammars.processes) == 1
        await grammars.close()
        needed = GrammarProcesses(Tokens(str(folder), 320, (end,)))
        await needed.check(GOOD, FIELD, "")
        await needed.close()

    asyncio.run(run())


def test_what_is_known_is_not_compiled_again_but_for_another_salt(folder):
    bad = grammar(json={"type": "strin"})

    async def test(grammars):
        assert "Invalid type" in await refusal(grammars, bad)
        compiled = grammars.compile
        grammars.compile = None
        await grammars.check(GOOD, FIELD, "")
        assert "Invalid type" in await refusal(grammars, bad)
        asked = []

        async def noted(grammar):
            asked.append(grammar)
            return await compiled(grammar)

        grammars.compile = noted
        await grammars.check(GOOD, FIELD, "salt")
        assert asked == [GOOD]

    with_grammars(folder, test)


def test_a_process_that_dies_costs_its_own_grammar_only(folder):
    async def test(grammars):
        stuck = asyncio.create_task(refusal(grammars, STUCK[0]))
        await asyncio.sleep(0.05)
        (at_work,) = [p for p in grammars.processes if p.is_at_work]
        os.kill(at_work.process.pid, signal.SIGKILL)
        assert "needs too much memory" in await stuck
        await grammars.check(grammar(regex="b"), FIELD, "")

    with_grammars(folder, test)


def test_the_space_of_addresses_is_what_the_kernel_says():
    before = address_space()
    held = mmap.mmap(-1, 1 << 26)
    assert (1 << 25) < address_space() - before < (1 << 28)
    held.close()
