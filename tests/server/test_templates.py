"""Chat templates in processes of their own: whatever one does, other chats are answered."""

import asyncio
import logging
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from specserve.errors import Overloaded, RequestError
from specserve.exchange.fair_queue import owner
from specserve.server.prompt import NUM_PROCESSES, TemplateProcesses
from specserve.text.chat_template import ChatTemplate
from tests.server.test_leaving import resident_bytes

pytestmark = pytest.mark.timed  # of each process: the deadlines here are below half a second

TEMPLATE = """
{%- set said = messages[0].content -%}
{%- if said == "power" -%}{{ (8 + messages | length) ** (9 ** 9) }}
{%- elif said == "huge" -%}{{ "a" * 10 ** (8 + messages | length) }}
{%- elif said == "long" -%}{{ "a" * 2 ** (24 + messages | length) }}
{%- elif said == "large" -%}{{ ("a" * 2 ** (26 + messages | length)) | length }}
{%- elif said == "half" -%}{{ "\\ud800" }}
{%- elif said == "raise" -%}{{ raise_exception("not this") }}
{%- else -%}{{ bos_token }}{{ said }}
{%- endif -%}
"""


def messages(said):
    return [{"role": "user", "content": said}]


def with_templates(test, seconds=0.4):
    """Run a test on processes that have started."""

    async def run():
        templates = TemplateProcesses(ChatTemplate(TEMPLATE, {"bos_token": "<s>"}), seconds)
        try:
            assert await templates.render(messages("hello")) == "<s>hello"
            await asyncio.gather(*(p.started.wait() for p in templates.processes))
            await test(templates)
        finally:
            await templates.close()

    asyncio.run(run())


async def refusal(templates, said):
    with pytest.raises(RequestError) as e:
        await templates.render(messages(said))
    return str(e.value)


def test_templates_stuck_in_c_hold_up_nobody_for_longer_than_their_deadline(caplog):
    async def test(templates):
        stuck = [asyncio.create_task(refusal(templates, "power")) for _ in range(NUM_PROCESSES)]
        others = [asyncio.create_task(templates.render(messages(f"{i}"))) for i in range(4)]
        assert await asyncio.gather(*others) == [f"<s>{i}" for i in range(4)]
        for task in stuck:
            assert "ran for more than 0.4 s" in await task

    with caplog.at_level(logging.WARNING, "specserve"):
        with_templates(test)
    assert len(caplog.messages) == NUM_PROCESSES
    assert all("is killed and replaced" in line and "\n" not in line for line in caplog.messages)


def test_one_stuck_template_delays_no_other_chat():
    async def test(templates):
        stuck = asyncio.create_task(refusal(templates, "power"))
        await asyncio.sleep(0)  # it goes first
        for i in range(20):
            assert await templates.render(messages(f"{i}")) == f"<s>{i}"
        assert not stuck.done()
        stuck.cancel()
        await asyncio.wait((stuck,))

    with_templates(test, seconds=60)


def test_a_chat_that_is_given_up_gives_its_process_back():
    async def test(templates):
        stuck = [asyncio.create_task(refusal(templates, "power")) for _ in range(NUM_PROCESSES)]
        await asyncio.sleep(0)
        for task in stuck:
            task.cancel()
        assert await templates.render(messages("next")) == "<s>next"

    with_templates(test, seconds=60)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("raise", "not this"),
        ("huge", "too much memory"),
        ("long", "characters"),
        ("half", "returns invalid text"),
    ],
)
def test_what_a_template_refuses_or_cannot_make_is_reported_and_the_next_is_rendered(said, reason):
    async def test(templates):
        assert reason in await refusal(templates, said)
        assert await templates.render(messages("next")) == "<s>next"

    with_templates(test, seconds=60)


def test_a_message_that_is_no_text_is_refused():
    async def test(templates):
        assert "not valid text" in await refusal(templates, "\ud800")

    with_templates(test)


def test_memory_that_a_template_took_is_given_back():
    async def test(templates):
        for _ in range(NUM_PROCESSES):
            assert await templates.render(messages("large")) == f"{2**27}"
        await asyncio.gather(*(templates.render(messages("next")) for _ in range(NUM_PROCESSES)))
        assert all(resident_bytes(p.process.pid) < 2**26 for p in templates.processes)

    with_templates(test, seconds=60)


def test_a_process_whose_memory_ran_out_renders_no_further_chat():
    """What a template has built is not always freed: the next chat must not pay for it."""

    async def test(templates):
        before = {p.process.pid for p in templates.processes}
        for _ in range(NUM_PROCESSES):
            assert "too much memory" in await refusal(templates, "huge")
        for i in range(2 * NUM_PROCESSES):
            assert await templates.render(messages(f"{i}")) == f"<s>{i}"
        assert not before & {p.process.pid for p in templates.processes}

    with_templates(test, seconds=60)


def test_chats_that_wait_are_counted_and_those_given_up_are_not():
    async def test(templates):
        tasks = [asyncio.create_task(refusal(templates, "power")) for _ in range(9)]
        await asyncio.sleep(0)
        assert templates.asked.total() == 9
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert templates.asked.total() == 0

    with_templates(test, seconds=60)


def test_a_process_that_is_killed_in_the_middle_costs_its_own_chat_only():
    async def test(templates):
        stuck = asyncio.create_task(templates.render(messages("power")))
        await asyncio.sleep(0)
        (at_work,) = [p for p in templates.processes if p.is_at_work]
        os.kill(at_work.process.pid, signal.SIGKILL)
        with pytest.raises(Overloaded, match=r"ended\. Retry"):
            await stuck
        assert await templates.render(messages("next")) == "<s>next"

    with_templates(test, seconds=60)


@contextmanager
def no_process_starts(monkeypatch):
    def failing(module, first):
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patched:
        patched.setattr("specserve.server.prompt.start_process", failing)
        yield


def test_chats_are_refused_only_while_no_process_can_be_started(monkeypatch):
    async def test(templates):
        for process in templates.processes:
            process.close()
        with no_process_starts(monkeypatch):
            for _ in range(NUM_PROCESSES + 1):
                with pytest.raises(Overloaded, match="no more processes"):
                    await templates.render(messages("hello"))
        assert await templates.render(messages("next")) == "<s>next"

    with_templates(test)


def test_no_chat_pays_for_a_process_that_cannot_be_started_next_to_its_own(monkeypatch, caplog):
    async def test(templates):
        spare = templates.free.get_nowait()
        templates.processes.remove(spare)
        spare.close()
        with no_process_starts(monkeypatch):
            assert await templates.render(messages("next")) == "<s>next"
            assert "ran for more than 0.4 s" in await refusal(templates, "power")
        assert await templates.render(messages("next")) == "<s>next"

    with_templates(test)
    assert sum("no more processes" in line for line in caplog.messages) == 3


def test_closing_ends_every_process():
    pids = []

    async def test(templates):
        pids.extend(p.process.pid for p in templates.processes)

    with_templates(test)
    assert len(pids) == NUM_PROCESSES
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_stuck_templates_of_one_key_delay_no_other_key():
    async def test(templates):
        async def stuck_chat():
            owner.set("one")
            await refusal(templates, "power")

        stuck = [asyncio.create_task(stuck_chat()) for _ in range(2 * NUM_PROCESSES)]
        await asyncio.sleep(0)
        owner.set("other")
        for i in range(20):
            assert await templates.render(messages(f"{i}")) == f"<s>{i}"
        assert not any(task.done() for task in stuck)
        for task in stuck:
            task.cancel()
        await asyncio.wait(stuck)

    with_templates(test, seconds=60)
