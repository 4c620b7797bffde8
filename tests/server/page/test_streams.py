"""Responses that stream: stop, reload, errors, keys, speed of the page."""

import os
import signal

import pytest

from tests.server.page.visit import COMPLETE, QUESTION, SECONDS
from tests.server.server_process import ServerProcess, eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pacing(paced):
    """A server whose steps take as many milliseconds as the seed says."""
    with paced() as server:
        yield server


def partial(here):
    [one] = here.kept()
    return one["messages"][-1]


def test_stop_frees_the_request_and_keeps_the_partial_response(visit, pacing):
    here = visit(server=pacing)
    here.begin("the cat", seed=50, max_tokens=400)
    assert pacing.metric("vllm:num_requests_running") == 1
    here.page.click("#stop")
    pacing.wait_until_idle()
    assert here.page.text_content("#status") == "Stopped"
    assert here.page.is_visible("#send")
    shown = here.text()
    assert partial(here)["isPartial"] and partial(here)["content"].strip() != ""
    here.page.reload()
    assert here.text() == shown
    assert "incomplete" in here.page.text_content(".message .note")


def elsewhere(page):
    """Another page in the same tab, and back."""
    page.goto(page.url + "dashboard")
    page.go_back()


@pytest.mark.parametrize("leave", [lambda page: page.reload(), elsewhere], ids=["reload", "back"])
def test_a_partial_response_survives_a_change_of_the_page(visit, pacing, leave):
    here = visit(server=pacing)
    here.begin("the cat", seed=100, max_tokens=100)
    eventually(lambda: len(here.text()) > 10, SECONDS)
    before = here.text()
    leave(here.page)
    assert "the cat" in here.page.locator(".message").first.inner_text()
    assert here.text().startswith(before)
    assert "incomplete" in here.page.text_content(".message .note")
    pacing.wait_until_idle()
    here.set(seed=1, max_tokens=12)
    here.page.click("[aria-label=Regenerate]")
    here.page.wait_for_selector(COMPLETE)
    assert "isPartial" not in partial(here)


def test_the_speed_is_shown_while_a_response_streams(visit, pacing):
    here = visit(server=pacing)
    here.ask("the cat", seed=20, max_tokens=60)  # steps without draft tokens are measured
    here.page.click("#new")
    here.begin("the cat", seed=50, max_tokens=400)
    shown = here.page.wait_for_function(FIGURES).json_value()
    assert [kind for kind, _ in shown] == ["rate", "ttft", "step", "gain", "tokens"]
    assert all("The server measured" in tip for kind, tip in shown if kind == "gain")
    here.page.click("#stop")
    pacing.wait_until_idle()


FIGURES = """() => document.querySelector(".streaming .speed .gain")
  && [...document.querySelectorAll(".streaming .figure")].map(f => [f.classList[1], f.title])"""


def test_a_partial_response_survives_another_conversation(visit, pacing):
    here = visit(server=pacing)
    here.begin("the cat", seed=100, max_tokens=100)
    here.page.click("#new")
    pacing.wait_until_idle()
    assert here.page.locator(".message").count() == 0 and here.page.text_content("#status") == ""
    here.page.click("#kept .title")
    assert here.text() != "" and here.page.locator(".message").count() == 2


def test_only_the_response_that_is_regenerated_last_is_kept(visit, pacing):
    here = visit(server=pacing)
    here.begin("the cat", seed=50, max_tokens=12)
    here.page.evaluate("document.querySelector('[aria-label=Regenerate]').click()")
    here.page.wait_for_selector(COMPLETE)
    shown = here.text()
    [kept] = here.kept()
    contents = [m["content"] for m in kept["messages"]]
    assert contents[0] == "the cat" and len(contents) == 2 and contents[1].strip() == shown.strip()


def test_a_double_click_sends_and_does_not_stop(visit, pacing):
    here = visit(server=pacing)
    here.set(seed=50, max_tokens=12)
    here.page.fill("#prompt", "the cat")
    here.page.dblclick("#send")
    here.page.wait_for_selector(COMPLETE)


def test_the_page_follows_a_long_response_until_the_user_scrolls(visit, pacing):
    here = visit(server=pacing)
    page = here.page
    page.set_viewport_size({"width": 360, "height": 330})
    here.begin("the cat", seed=20, max_tokens=480)
    hidden = "(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.all.log)"
    eventually(lambda: page.evaluate("document.all.log.scrollTop") > 30, SECONDS)
    assert page.evaluate(hidden) < 40
    page.evaluate("document.all.log.scrollTo(0, 0)")
    page.wait_for_timeout(300)
    assert page.evaluate("document.all.log.scrollTop") == 0
    if page.is_visible("#stop"):
        page.click("#stop")


def test_a_killed_engine_only_pauses_the_response(visit, folder):
    with ServerProcess(folder) as server:
        here = visit(server=server)
        here.begin("the cat", temperature=0, max_tokens=300)
        os.kill(server.engine_pid, signal.SIGKILL)
        here.page.wait_for_selector(COMPLETE)
        assert "isPartial" not in partial(here)
        there = visit("dashboard", server=server)
        there.page.wait_for_selector(".mark.restart", state="attached")
        assert "Engine restarts1" in there.page.text_content("#totals")
        there.page.goto("about:blank")


def test_a_dead_server_is_reported_and_the_response_is_kept(visit, paced):
    with paced() as server:
        here = visit(server=server)
        here.begin("the cat", seed=50, max_tokens=400)
        server.signal(signal.SIGKILL)
        here.page.wait_for_selector(".message .error:text-matches('.')")
        assert here.page.is_visible("#send") and not here.page.is_visible("#stop")
        assert partial(here)["isPartial"]
        here.complaints.clear()  # the browser reports the broken connection


def test_a_key_is_asked_for_and_stays_in_the_tab(visit, folder, tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    with ServerProcess(folder, f"--api-key-file={tmp_path / 'keys'}") as server:
        for path in ("", "dashboard"):
            here = visit(path, server=server)
            here.page.wait_for_selector("#key-asked", state="visible")
            here.page.fill("#key", "secret\u2019")
            here.page.click("#use-key")
            here.page.wait_for_selector("text=invalid key")
            assert here.page.is_visible("#key")
            here.page.fill("#key", "wrong")
            here.page.click("#use-key")
            here.page.wait_for_selector("#key-error:text-matches('refused the key')")
            assert here.page.text_content("#model") == "not connected"
            here.page.fill("#key", "secret")
            here.page.click("#use-key")
            here.page.wait_for_selector("#key-asked", state="hidden")
            assert here.page.evaluate("Object.keys(localStorage)") == []
            if not path:
                expired(here)
            here.complaints.clear()  # the browser reports the 401
            here.page.goto("about:blank")


def expired(here):
    """A key that the server refuses later is asked for again, and the message is not lost."""
    here.page.evaluate("sessionStorage.setItem('specserve.key', 'old')")
    here.page.evaluate("import('/page/shared/api.js').then(api => api.setKey('old'))")
    here.ready()
    here.page.fill("#prompt", "the cat")
    here.page.press("#prompt", "Enter")
    here.page.wait_for_selector("#key-asked", state="visible")
    assert "refused the key" in here.page.text_content("#key-error")
    assert here.page.text_content("#error") == ""
    assert here.page.input_value("#prompt") == "the cat"
    here.page.fill("#key", "secret")
    here.page.press("#key", "Enter")
    here.page.wait_for_selector("#key-asked", state="hidden")
    here.ask("the cat", max_tokens=5)
    here.page.evaluate("localStorage.clear()")


def test_the_page_paints_at_once(visit):
    here = visit()
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    eventually(lambda: here.page.evaluate(paint) is not None)
    assert here.page.evaluate(paint) < 200  # ms


FRAMES = """
() => new Promise((done) => {
  const times = [];
  const look = (now) => {
    times.push(now);
    if (now - times[0] < 2000) requestAnimationFrame(look);
    else done(1000 * (times.length - 1) / (now - times[0]));
  };
  requestAnimationFrame(look);
})
"""
FRAME = 20  # ms at 50 frames per second


def test_200_tokens_a_second_leave_the_page_fluent(visit, demo):
    """The page receives a recorded stream at this speed while it shows a tree.

    The time of the page's thread must fit into frames.
    """
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 600,
        "ignore_eos": True,
        "return_speculation_details": True,
        "stream_options": {"include_usage": True},
    }
    *recorded, _ = demo.stream("/v1/chat/completions", body)
    here = visit().ready()
    page = here.page
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time
    page.evaluate(REPLAY, [recorded, 200])
    page.fill("#prompt", "again")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.assistant .token")
    page.locator(".token").first.click()
    page.wait_for_selector("#tree svg")
    begun = busy_seconds(session)
    rate = page.evaluate(FRAMES)
    used = 1000 * (busy_seconds(session) - begun) / (2 * rate)
    assert page.is_visible("#stop")  # it has streamed all the time
    print(f"{rate:.1f} frames a second; {used:.1f} ms of CPU time per frame")
    assert used < FRAME
    assert rate > 50
    page.click("#stop")


def busy_seconds(session):
    """Of the page's thread: scripts, styles, layout and painting."""
    found = session.send("Performance.getMetrics")["metrics"]
    return next(one["value"] for one in found if one["name"] == "TaskDuration")


REPLAY = """
([events, perSecond]) => {
  const send = window.fetch;
  window.fetch = (path, options) => {
    if (!String(path).endsWith("chat/completions")) return send(path, options);
    const bytes = new TextEncoder();
    let place = 0, tokens = 0, isOver = false;
    const begun = performance.now();
    const stream = new ReadableStream({
      async pull(to) {
        while (place < events.length) {
          const event = events[place];
          const due = begun + 1000 * tokens / perSecond;
          const wait = due - performance.now();
          if (wait > 0) await new Promise((go) => setTimeout(go, wait));
          if (isOver) return;
          const steps = event.choices[0]?.speculation?.steps ?? [];
          tokens += steps.reduce((sum, step) => sum + step.tokens.length, 0);
          place += 1;
          to.enqueue(bytes.encode(`data: ${JSON.stringify(event)}\\n\\n`));
          return;
        }
        to.enqueue(bytes.encode("data: [DONE]\\n\\n"));
        to.close();
      },
      cancel() { isOver = true; },
    });
    options.signal.addEventListener("abort", () => (isOver = true));
    return Promise.resolve(new Response(stream, { status: 200 }));
  };
}
"""
