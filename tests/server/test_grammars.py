"""Grammars are compiled in processes of their own: whatever one does, others are checked."""

import asyncio
import mmap
import os
import signal

import pytest

from specserve.errors import Overloaded, RequestError
from specserve.exchange.fair_queue import owner
from specserve.server.bounded_process import address_space
from specserve.server.grammar_process import SECONDS, GrammarSetup
from specserve.server.prompt import GrammarProcesses
from specserve.text.grammars.structured_outputs import StructuredOutputsParams, grammar_of
from tests.checkpoints import EOS, tiny_tokenizer
from tests.text.grammars.hostile import ENDLESS, EVERY

FIELD = "structured_outputs.json"


def grammar(**asked):
    return grammar_of(StructuredOutputsParams(**asked))


GOOD = grammar(regex="[ab]{3}")
STUCK = [grammar(**EVERY[name]) for name in sorted(ENDLESS)]


def with_grammars(folder, test):
    async def run():
        end = tiny_tokenizer().convert_tokens_to_ids(EOS)
        grammars = GrammarProcesses(GrammarSetup(str(folder), 320, (end,)))
        grammars.seconds = 60  # by the clock; those of the CPU are what tests wait for
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
        assert "compiling takes more than 0.8 s" in await stuck
        assert "compiling takes more than 0.8 s" in await refusal(grammars, STUCK[1])
        await grammars.check(grammar(regex="b"), FIELD, "")

    with_grammars(folder, test)


def test_what_one_key_has_sent_is_checked_again_for_another_key(folder, monkeypatch):
    """Else the time to the first token would show it."""
    compiled, compile = [], GrammarProcesses.compile

    async def counted(self, grammar):
        compiled.append(grammar)
        return await compile(self, grammar)

    async def test(grammars):
        monkeypatch.setattr(GrammarProcesses, "compile", counted)
        for tenant, number in ((1, 1), (2, 2), (1, 2), (("::1", 4), 3), (("::1", 5), 3)):
            owner.set(tenant)
            await grammars.check(grammar(regex="c"), FIELD, "")
            assert len(compiled) == number

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
    monkeypatch.setattr("specserve.server.prompt.SOON", 0.05)
    end = tiny_tokenizer().convert_tokens_to_ids(EOS)

    async def run():
        grammars = GrammarProcesses(GrammarSetup(str(folder), 320, (end,)))
        assert not grammars.processes
        await asyncio.sleep(0.1)
        assert len(grammars.processes) == 1
        await grammars.close()
        needed = GrammarProcesses(GrammarSetup(str(folder), 320, (end,)))
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


def is_at_work(process):
    return process.is_at_work and not process.has_ended


async def end_at_work(grammars, number):
    """Send a signal to the process that is at work, once one is."""
    async with asyncio.timeout(10):
        while not (at_work := [p for p in grammars.processes if is_at_work(p)]):
            await asyncio.sleep(0.001)
    os.kill(at_work[0].process.pid, number)
    await at_work[0].ended.wait()


def test_a_grammar_whose_process_was_killed_is_compiled_in_another(folder):
    async def test(grammars):
        stuck = asyncio.create_task(refusal(grammars, STUCK[0]))
        await end_at_work(grammars, signal.SIGKILL)
        assert "takes more than 0.8 s" in await stuck

    with_grammars(folder, test)


def test_what_was_not_found_out_is_not_kept(folder):
    async def test(grammars):
        stuck = asyncio.create_task(grammars.check(STUCK[0], FIELD, ""))
        for _ in range(2):
            await end_at_work(grammars, signal.SIGKILL)
        with pytest.raises(Overloaded, match=r"ended\. Retry"):
            await stuck
        grammars.seconds = 0.05
        with pytest.raises(Overloaded, match="the CPU is overloaded"):
            await grammars.check(STUCK[0], FIELD, "")
        assert grammars.verdicts.find(STUCK[0]) is None

    with_grammars(folder, test)


def test_a_fault_of_the_process_is_the_grammars(folder):
    async def test(grammars):
        stuck = asyncio.create_task(refusal(grammars, STUCK[0]))
        await end_at_work(grammars, signal.SIGSEGV)
        assert "needs too much memory" in await stuck
        assert "needs too much memory" in await refusal(grammars, STUCK[0])
        await grammars.check(grammar(regex="b"), FIELD, "")

    with_grammars(folder, test)


def test_time_in_which_the_process_does_not_run_does_not_count(folder):
    async def test(grammars):
        pids = [p.process.pid for p in grammars.processes]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(grammars.check(grammar(regex="b"), FIELD, ""))
        await asyncio.sleep(SECONDS + 0.1)
        assert not waiting.done()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await waiting

    with_grammars(folder, test)


def test_what_many_ask_at_once_is_compiled_once_until_none_of_them_is_left(folder):
    async def test(grammars):
        tasks = [asyncio.create_task(grammars.check(STUCK[0], FIELD, "")) for _ in range(8)]
        other = asyncio.create_task(grammars.check(STUCK[0], FIELD, "salt"))
        await asyncio.sleep(0.05)
        assert grammars.asked.total() == 9
        assert [check.num_waiting for check in grammars.checks.values()] == [8, 1]
        for task in [*tasks[1:], other]:
            task.cancel()
        await asyncio.sleep(0.05)
        (check,) = grammars.checks.values()
        assert grammars.asked.total() == 1 and not check.task.done()
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        assert grammars.asked.total() == 0 and not grammars.checks and check.task.cancelled()
        assert not any(p.is_at_work for p in grammars.processes)

    with_grammars(folder, test)


def test_what_was_found_out_together_is_reported_to_each(folder):
    async def test(grammars):
        bad = grammar(json={"type": "strin"})
        for told in await asyncio.gather(*(refusal(grammars, bad) for _ in range(3))):
            assert "Invalid type" in told
        await asyncio.gather(*(grammars.check(grammar(regex="b"), FIELD, "") for _ in range(3)))
        assert not grammars.checks

    with_grammars(folder, test)


def test_closing_ends_a_check_and_starts_no_other_process(folder):
    async def test(grammars):
        stuck = asyncio.create_task(grammars.check(STUCK[0], FIELD, ""))
        while not any(process.started.is_set() for process in grammars.processes):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await grammars.close()
        with pytest.raises(Overloaded, match="shutting down"):
            await stuck
        assert all(p.ended.is_set() for p in grammars.processes)

    with_grammars(folder, test)


def test_a_check_whose_process_has_not_started_is_warned_about_the_end_too(folder):
    async def test(grammars):
        grammars.begin_first()
        for process in grammars.processes:
            process.started.clear()  # as if it were still on its way
        waiting = asyncio.create_task(grammars.check(STUCK[0], FIELD, ""))
        await asyncio.sleep(0.05)
        await grammars.close()
        with pytest.raises(Overloaded, match="shutting down"):
            await waiting

    with_grammars(folder, test)


def test_the_space_of_addresses_is_what_the_kernel_says():
    before = address_space()
    held = mmap.mmap(-1, 1 << 26)
    assert (1 << 25) < address_space() - before < (1 << 28)
    held.close()
