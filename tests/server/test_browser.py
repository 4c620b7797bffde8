"""The pages in a browser, as a visitor uses them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.config import DEMO_DRAFT, DEMO_TARGET
from tests.server.environments import python_with
from tests.server.server_process import ServerProcess, eventually, payloads
from tests.server.test_node_clients import HERE as NODE
from tests.server.test_node_clients import INSTALL

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PICTURES = os.environ.get("SPECSERVE_PICTURES")  # a folder to write them to: docs/pictures
SECONDS = 20
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 360, "height": 740}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: the pages are NOT checked here"),
]


@pytest.fixture(scope="module")
def browser():
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    command = [python_with("playwright"), "-c", show]
    packages = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    sys.path.append(packages)  # its Python is this one
    try:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            flags = ["--no-sandbox"] if os.geteuid() == 0 else []
            started = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
            yield started
            started.close()
    finally:
        sys.path.remove(packages)


@pytest.fixture(scope="module")
def demo():
    flags = "--served-model-name=demo", f"--draft-model={DEMO_DRAFT}", "--drafter=model"
    with ServerProcess(DEMO_TARGET, *flags, **{"memory.kv_bytes": 1 << 28}) as server:
        yield server


LISTEN = """
const send = window.fetch;
window.told = [];
window.fetch = async (path, options) => {
  const response = await send(path, options);
  if (path.endsWith("completions")) response.clone().text().then((t) => told.push(t), () => {});
  return response;
};
"""


class Visit:
    """A page, what it has complained of, and whom it has asked."""

    def __init__(self, browser, url, path="", **context):
        self.context = browser.new_context(viewport=WIDE, **context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * SECONDS)
        self.page.add_init_script(LISTEN)
        self.url, self.complaints, self.asked = url, [], []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self.hear)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url + "/" + path)

    def hear(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def close(self):
        self.context.close()
        assert self.complaints == []
        assert [url for url in self.asked if not url.startswith(self.url)] == []

    def ask(self, text, **controls):
        """Send a message, and wait for the end of the answer; what the server sent."""
        self.set(**controls)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.page.wait_for_selector("#status:text-matches('complete')")
        told = self.page.evaluate("told.at(-1)")
        return [*payloads(told.encode().splitlines())]

    def set(self, **controls):
        for name, value in controls.items():
            self.page.fill(f"#controls [name={name}]", str(value))

    def text(self):
        return self.page.locator(".message.assistant .text").last.text_content()


@pytest.fixture
def visit(browser, demo):
    visits = []

    def begin(path="", server=demo, **context):
        visits.append(Visit(browser, server.url, path, **context))
        return visits[-1]

    yield begin
    for each in visits:
        each.close()


QUESTION = "What does shutil.copytree do?"
ASKED = {"temperature": 0, "seed": 5, "max_tokens": 60}


def test_an_answer_is_colored_by_who_drafted_it(visit, demo):
    here = visit()
    here.page.wait_for_selector("#sources input")
    events = here.ask(QUESTION, **ASKED)
    assert events[-1] == "[DONE]"
    body = ASKED | {"messages": [{"role": "user", "content": QUESTION}]}
    [choice] = demo.post("/v1/chat/completions", body).body["choices"]
    text = choice["message"]["content"]
    assert here.text() == text
    want, begin = [], 0
    for step in steps_of(events):
        for end, sources in zip(step["ends"], step["sources"], strict=True):
            if end > begin:
                want.append((text[begin:end], COLORS["model"] if sources else None))
            begin = end
    shown = here.page.eval_on_selector_all(
        ".message.assistant .step > span", "all => all.map(s => [s.textContent, s.className])"
    )
    assert [(t, color_of(name)) for t, name in shown] == want
    assert {color for _, color in want} > {None}
    assert here.page.locator("#figures dd").count() >= 4


def steps_of(events):
    choices = (c for e in events if e != "[DONE]" for c in e["choices"])
    return [step for c in choices if "speculation" in c for step in c["speculation"]["steps"]]


COLORS = {"ngram": 0, "model": 1, "grammar": 2, "prediction": 3}  # of the sources, on every page


def color_of(name):
    colors = [part for part in name.split() if part.startswith("source-")]
    return int(colors[0].removeprefix("source-")) if colors else None


def test_a_click_shows_the_tree_of_a_step(visit):
    here = visit()
    events = here.ask(QUESTION, **ASKED)
    steps = steps_of(events)
    number = max(range(len(steps)), key=lambda i: len(steps[i]["tree"]["accepted"]))
    tree = steps[number]["tree"]
    here.page.click(f".step[data-step='{number}']")
    here.page.wait_for_selector(f"#tree-words:text-matches('Step {number + 1}:')")
    counts = [here.page.locator(f"#tree {one}").count() for one in ("rect", "text.right-text")]
    assert counts == [1 + len(tree["tokens"]), 1 + len(tree["accepted"])]
    assert here.page.locator("#tree text.wrong-text").count() == counts[0] - counts[1]
    assert f"{len(tree['accepted'])} accepted" in here.page.text_content("#tree-words")


def test_the_keyboard_alone_is_enough(visit):
    here = visit()
    page = here.page
    page.wait_for_selector("#sources input")
    reach(page, "#prompt")
    page.keyboard.type("What does os.path.join return?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#status:text-matches('complete')")
    reach(page, ".step")
    page.wait_for_selector("#tree-words:text-matches('Step 1:')")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#tree-words:text-matches('Step 2:')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#tree-words:text-matches('Step 1:')")
    reach(page, "#show-race")
    page.keyboard.press("Enter")
    assert page.is_visible("#race") and not page.is_visible("#chat")


def reach(page, selector):
    """Press Tab until an element has the focus."""
    page.evaluate("document.activeElement.blur()")
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("s => document.activeElement.matches(s)", selector):
            return
    raise AssertionError(f"{selector} cannot be reached")


def test_a_race_ends_with_equal_texts(visit):
    here = visit()
    page = here.page
    page.wait_for_selector("#sources input")
    here.set(temperature=0.8, max_tokens=80)
    page.click("#show-race")
    page.click("#race-go")
    page.wait_for_selector("#verdict:text-matches('identical')")
    texts = page.locator(".lane .text").all_text_contents()
    assert texts[0] == texts[1] != ""
    assert f"{len(texts[0])} characters" in page.text_content("#verdict")
    watches = [float(t.split()[0]) for t in page.locator(".watch").all_text_contents()]
    assert all(watches)
    is_clear = "times as fast" in page.text_content("#verdict")
    assert page.locator(".watch.first").count() == is_clear
    picture(page, "race")


def test_stop_frees_the_request(visit, paced):
    with paced() as server:
        here = visit(server=server)
        here.page.wait_for_selector("#model:text-matches('.')")
        here.set(seed=50, max_tokens=400)  # milliseconds of a step
        here.page.fill("#prompt", "the cat")
        here.page.press("#prompt", "Enter")
        here.page.wait_for_selector(".message.assistant .step")
        assert server.metric("vllm:num_requests_running") == 1
        here.page.click("#stop")
        server.wait_until_idle()
        assert here.page.text_content("#status") == "stopped"
        assert here.page.is_visible("#send")


def test_only_the_answer_that_is_asked_for_last_is_kept(visit, paced):
    with paced() as server:
        here = visit(server=server)
        here.page.wait_for_selector("#model:text-matches('.')")
        here.set(seed=50, max_tokens=12)
        here.page.fill("#prompt", "the cat")
        here.page.press("#prompt", "Enter")
        here.page.wait_for_selector(".message.assistant .step")
        here.page.click("text=Ask again")
        here.page.wait_for_selector("#status:text-matches('complete')")
        shown = here.text()
        [kept] = here.page.evaluate("JSON.parse(localStorage.getItem('specserve.conversations'))")
        assert [m["content"] for m in kept["messages"]] == ["the cat", shown]


def test_a_double_click_sends_and_does_not_stop(visit, paced):
    with paced() as server:
        here = visit(server=server)
        here.page.wait_for_selector("#model:text-matches('.')")
        here.set(seed=50, max_tokens=12)
        here.page.fill("#prompt", "the cat")
        here.page.dblclick("#send")
        here.page.wait_for_selector("#status:text-matches('complete')")


def test_the_page_follows_a_long_answer_until_somebody_scrolls(visit, paced):
    with paced() as server:
        here = visit(server=server)
        page = here.page
        page.wait_for_selector("#model:text-matches('.')")
        page.set_viewport_size({"width": 360, "height": 400})
        here.set(seed=20, max_tokens=480)
        page.fill("#prompt", "the cat")
        page.press("#prompt", "Enter")
        height = "document.querySelector('.assistant .text').clientHeight"
        eventually(lambda: page.evaluate(height) > 120, SECONDS)
        bottom = "document.querySelector('.assistant .text').getBoundingClientRect().bottom"
        assert page.evaluate(bottom) <= 400 and page.evaluate("scrollY") > 0
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(300)
        assert page.evaluate("scrollY") == 0
        if page.is_visible("#stop"):
            page.click("#stop")


def test_a_race_waits_for_a_chat_and_for_a_prompt(visit, paced):
    with paced() as server:
        here = visit(server=server)
        page = here.page
        page.wait_for_selector("#model:text-matches('.')")
        here.set(seed=50, max_tokens=400)
        page.fill("#prompt", "the cat")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".message.assistant .step")
        page.click("#show-race")
        page.click("#race-go")
        assert "streaming in the chat" in page.text_content("#verdict")
        assert server.metric("vllm:num_requests_running") == 1
        page.click("#show-chat")
        page.click("#stop")
        page.click("#show-race")
        page.fill("#race-prompt", " ")
        page.click("#race-go")
        assert page.is_visible("#race-go")


def test_a_seed_below_0_is_drawn_once_for_both_lanes(visit):
    here = visit()
    here.page.wait_for_selector("#sources input")
    here.set(temperature=2, seed=-1, max_tokens=40)
    here.page.click("#show-race")
    here.page.click("#race-go")
    here.page.wait_for_selector("#verdict:text-matches('identical|differ')")
    assert "identical" in here.page.text_content("#verdict")


def test_what_is_scaled_is_said(browser):
    with ServerProcess(None, "--demo-compute=qwen3-0.6b", **{"memory.kv_bytes": 1 << 30}) as server:
        assert "demo: specserve-demo, padded to qwen3-0.6b compute (same text)" in server.said
        for path in ("", "dashboard"):
            here = Visit(browser, server.url, path)
            here.page.wait_for_selector("#scaled", state="visible")
            note = here.page.text_content("#scaled")
            assert "specserve-demo, padded to qwen3-0.6b compute" in note
            if not path:
                picture_of_race(here.page)
            here.close()


def picture_of_race(page):
    """As README shows it: at a real model's cost, once the server has learnt what steps take."""
    page.set_viewport_size({"width": 1280, "height": 560})
    page.fill("#controls [name=temperature]", "0")
    page.click("#show-race")
    for _ in range(2):
        page.click("#race-go")
        page.wait_for_selector("#verdict:text-matches('identical')")
    page.wait_for_timeout(500)  # until what has landed has its color
    picture(page, "race-at-cost")


def test_a_dead_stream_is_reported(visit, paced):
    with paced() as server:
        here = visit(server=server)
        here.set(seed=50, max_tokens=400)
        here.page.fill("#prompt", "the cat")
        here.page.press("#prompt", "Enter")
        here.page.wait_for_selector(".message.assistant .step")
        server.signal(signal.SIGKILL)
        here.page.wait_for_selector(".message .error:text-matches('.')")
        assert here.page.is_visible("#send") and not here.page.is_visible("#stop")
        here.complaints.clear()  # the browser tells of the broken connection


def test_a_key_is_asked_for_and_kept_in_the_tab(visit, folder, tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    with ServerProcess(folder, f"--api-key-file={tmp_path / 'keys'}") as server:
        for path in ("", "dashboard"):
            here = visit(path, server=server)
            here.page.wait_for_selector("#key-asked", state="visible")
            here.page.fill("#key", "secret\u2019")
            here.page.click("#use-key")
            here.page.wait_for_selector("text=invalid key")
            assert here.page.is_visible("#key")
            here.page.fill("#key", "secret")
            here.page.click("#use-key")
            here.page.wait_for_selector("#key-asked", state="hidden")
            assert here.page.evaluate("Object.keys(localStorage)") == []
            here.complaints.clear()  # the browser tells of the 401
            here.page.goto("about:blank")  # it asks no server that has ended


def test_conversations_are_kept_edited_and_asked_again(visit):
    here = visit()
    page = here.page
    page.wait_for_selector("#sources input")
    here.ask(QUESTION, **ASKED)
    first = here.text()
    page.click("text=Ask again")
    page.wait_for_selector("#status:text-matches('complete')")
    assert here.text() == first and page.locator(".message").count() == 2
    page.reload()
    assert here.text() == first
    page.click("#new")
    page.click(f"#kept button:has-text('{QUESTION}')")
    assert here.text() == first
    page.fill("#prompt", "a draft")
    for leave in (lambda: page.click("#cancel"), lambda: page.press("#prompt", "Escape")):
        page.click("text=Edit")
        assert page.input_value("#prompt") == QUESTION and page.locator(".message").count() == 0
        leave()
        assert page.input_value("#prompt") == "a draft" and here.text() == first
        assert not page.is_visible("#cancel")
    page.click("text=Edit")
    assert page.input_value("#prompt") == QUESTION and page.locator(".message").count() == 0
    page.click("#new")
    page.click(f"#kept button[aria-label^='Delete {QUESTION}']")
    assert page.locator("#kept li").count() == 0


def test_two_tabs_lose_none_of_their_answers(visit):
    here = visit()
    here.page.wait_for_selector("#sources input")
    here.ask(QUESTION, **ASKED)
    there = here.context.new_page()
    there.goto(here.url)
    there.wait_for_selector("#sources input")
    assert there.locator(".message").count() == 0
    there.fill("#prompt", "another question")
    there.press("#prompt", "Enter")
    there.wait_for_selector("#status:text-matches('complete')")
    here.ask("a third one", **ASKED)
    here.page.reload()
    assert here.page.locator(".message").count() == 4
    assert here.page.locator("#kept li").count() == 2


def test_a_reload_keeps_the_question_whose_answer_has_not_come(visit, paced):
    with paced() as server:
        here = visit(server=server)
        here.page.wait_for_selector("#model:text-matches('.')")
        here.set(seed=200, max_tokens=100)  # milliseconds of a step
        here.page.fill("#prompt", "the cat")
        here.page.press("#prompt", "Enter")
        here.page.wait_for_selector(".message.assistant .step")
        here.page.reload()
        assert "the cat" in here.page.locator(".message").first.inner_text()
        server.wait_until_idle()


def test_a_limit_that_another_server_had_is_taken_back(visit, folder):
    with ServerProcess(folder, "--drafter=none") as server:
        here = visit(server=server)
        kept = json.dumps({"values": {"max_nodes": "8"}})
        here.page.evaluate("kept => localStorage.setItem('specserve.settings', kept)", kept)
        here.page.reload()
        here.ask("the cat", temperature=0, max_tokens=5)
        assert here.page.input_value("#controls [name=max_nodes]") == ""


def test_an_edited_message_replaces_what_follows_it(visit):
    here = visit()
    here.page.wait_for_selector("#sources input")
    here.ask(QUESTION, **ASKED)
    here.page.click("text=Edit")
    here.ask("a")
    assert here.page.locator(".message.user .text").all_text_contents() == ["a"]
    assert here.page.locator("#kept li").count() == 1


def test_conversations_with_one_question_are_distinguished_by_their_times(visit):
    here = visit()
    page = here.page
    page.wait_for_selector("#sources input")
    for _ in range(2):
        page.click("#new")
        here.ask(QUESTION, **ASKED)
        page.wait_for_timeout(1000)  # the times are in seconds
    titles = page.locator("#kept li button:first-child").all_text_contents()
    names = page.eval_on_selector_all(
        "#kept li button:last-child", "all => all.map(b => b.ariaLabel)"
    )
    assert all(QUESTION in one for one in titles + names)
    assert len({*titles}) == len({*names}) == 2


def test_the_settings_are_kept(visit):
    here = visit()
    page = here.page
    page.wait_for_selector("#sources input")
    controls = ASKED | {"max_nodes": 3, "system": "Be brief."}
    here.set(**{name: str(value) for name, value in controls.items()})
    page.uncheck("#sources input[name=model]")
    page.reload()
    page.wait_for_selector("#sources input")
    shown = {name: page.input_value(f"#controls [name={name}]") for name in controls}
    assert shown == {name: str(value) for name, value in controls.items()}
    assert not page.is_checked("#sources input[name=model]")


@pytest.mark.parametrize(
    ("control", "typed", "told"),
    [
        ("temperature", "3", "Temperature: set a number from 0 to 2"),
        ("temperature", "0.00001", "Temperature: "),  # refused by the server
        ("max_nodes", "1.5", "Draft tokens per step: set a whole number from 0 to"),
        ("max_tokens", "0", "Max tokens: set a whole number of at least 1"),
        ("seed", "1e99", "Seed: set a whole number of at least -1"),
        ("seed", "-", "Seed: set a whole number of at least -1"),
    ],
)
def test_a_wrong_setting_is_named_and_leaves_the_message_in_the_box(visit, control, typed, told):
    here = visit()
    page = here.page
    page.wait_for_selector("#sources input")
    page.locator(f"#controls [name={control}]").press_sequentially(typed)
    page.fill("#prompt", "a question")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#error:text-matches('.')")
    assert page.text_content("#error").startswith(told)
    assert "Expected" not in page.text_content("#error")
    assert page.input_value("#prompt") == "a question"
    assert page.locator(".message").count() == 0
    here.complaints.clear()  # the browser tells of a status 400
    here.ask("a question", **ASKED | {control: ""})
    assert page.text_content("#error") == ""


def test_a_new_answer_clears_the_figures_and_the_tree_of_the_last(visit, paced):
    with paced() as server:
        here = visit(server=server)
        page = here.page
        page.wait_for_selector("#model:text-matches('.')")
        here.ask("the cat", seed=1, max_tokens=8)
        page.wait_for_selector("#figures dd")
        page.click(".step")
        page.wait_for_selector("#tree svg")
        here.set(seed=100, max_tokens=400)
        page.fill("#prompt", "the dog")
        page.press("#prompt", "Enter")
        page.wait_for_selector("#stop", state="visible")
        assert page.locator("#figures dd").count() == page.locator("#tree svg").count() == 0
        assert "Click a word" in page.text_content("#tree-words")
        page.click("#stop")
        server.wait_until_idle()
        page.wait_for_load_state("networkidle")


def test_on_a_phone_the_tree_opens_over_the_text_and_takes_the_focus(visit, axe):
    here = visit()
    page = here.page
    page.set_viewport_size(PHONE)
    page.wait_for_selector("#sources input", state="attached")
    page.evaluate(
        'localStorage.setItem(\'specserve.settings\', \'{"values": {"max_tokens": "60"}}\')'
    )
    page.reload()
    page.wait_for_selector("#sources input", state="attached")
    here.ask(QUESTION)
    step, has_focus = page.locator(".step").last, "e => e === document.activeElement"
    for begin, leave in [
        (step.click, lambda: page.click("#close-step")),
        (lambda: page.keyboard.press("Enter"), lambda: page.keyboard.press("Escape")),
    ]:
        begin()
        page.wait_for_selector("#step.sheet #tree svg")
        assert page.locator("#tree").evaluate(has_focus)
        sheet, word = page.locator("#step").bounding_box(), step.bounding_box()
        assert word["y"] >= 0 and word["y"] + word["height"] <= sheet["y"]
        assert sheet["y"] + sheet["height"] <= PHONE["height"]
        picture(page, "tree-360")
        page.evaluate(axe)
        found = page.evaluate("axe.run()")["violations"]
        assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
        leave()
        assert page.locator("#step.sheet").count() == 0 and step.evaluate(has_focus)


def test_a_source_has_one_color_wherever_it_is_listed(visit):
    here = visit()
    names = [*COLORS, "a.b:Own", "a.b:Other"]
    colors = here.page.evaluate(
        "names => import('/page/view.js').then(view => names.map(view.colorOf))", names
    )
    assert colors[: len(COLORS)] == [f"source-{place}" for place in COLORS.values()]
    assert {*colors[len(COLORS) :]} <= {f"source-{place}" for place in range(3, 8)}
    grounds = "c => getComputedStyle(document.body.appendChild(Object.assign("
    grounds += "document.createElement('i'), { className: c }))).backgroundColor"
    assert len({here.page.evaluate(grounds, f"source-{place}") for place in range(8)}) == 8


@pytest.mark.parametrize("place", ["conversations", "settings", "open"])
@pytest.mark.parametrize(
    "kept",
    [
        "{",
        "{}",
        "[1]",
        "null",
        '{"values": 3, "off": 3}',
        '{"values": {"seed": 1, "max_nodes": "a"}}',
        '[{"id": 1}]',
        '[{"id": "a", "messages": 3}]',
    ],
)
def test_what_others_have_kept_is_passed_over(visit, place, kept):
    here = visit()
    keep = "([place, kept]) => { localStorage.setItem('specserve.' + place, kept);"
    keep += " sessionStorage.setItem('specserve.' + place, kept) }"
    here.page.evaluate(keep, [place, kept])
    here.page.reload()
    here.page.wait_for_selector("#sources input")
    assert here.page.locator("#kept li").count() == 0
    here.ask(QUESTION, **ASKED)
    assert here.page.locator("#kept li").count() == 1


def test_the_settings_are_sent(visit):
    here = visit()
    page = here.page
    page.wait_for_selector("#sources input")
    boxes = page.locator("#sources input")
    names = [boxes.nth(i).get_attribute("name") for i in range(boxes.count())]
    page.uncheck("#sources input[name=model]")
    page.fill("#controls [name=system]", "Be brief.")
    with page.expect_request("**/v1/chat/completions") as sent:
        here.ask("a", max_nodes=3, **ASKED)
    body = json.loads(sent.value.post_data)
    assert "model" in names and body["speculation"] == {
        "sources": [name for name in names if name != "model"],
        "max_nodes": 3,
    }
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body[name] for name in ASKED} == ASKED


@pytest.mark.parametrize("path", ["", "dashboard"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_every_width_and_scheme_is_readable(visit, axe, path, scheme, size):
    here = visit(path, color_scheme=scheme)
    page = here.page
    page.set_viewport_size(size)
    page.wait_for_selector("#model:text('demo')")
    if not path:
        here.page.evaluate("document.querySelector('#settings').open = true")
        here.ask(QUESTION, **ASKED)
        page.locator(".step").last.click()
        page.wait_for_selector("#tree svg")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, dark[4:-1].split(","))) < 200) == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    picture(page, f"{path or 'chat'}-{scheme}-{size['width']}")
    page.evaluate(axe)
    found = page.evaluate("axe.run()")["violations"]
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    assert [(v["id"], [n["html"][:200] for n in v["nodes"]]) for v in serious] == []


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The source of axe-core."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm: what axe-core finds is NOT checked here")
    folder = shutil.copytree(NODE, tmp_path_factory.mktemp("axe") / "clients")
    subprocess.run(INSTALL, cwd=folder, check=True, capture_output=True)
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


def picture(page, name):
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png")


def test_the_dashboard_moves_with_the_server(visit, demo):
    here = visit("dashboard")
    page = here.page
    page.wait_for_selector("#times tr")
    body = ASKED | {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0.8}
    before = demo.metric("vllm:generation_tokens_total")
    demo.post("/v1/chat/completions", body)
    count = "document.querySelector('#times tr td:last-child').textContent"
    eventually(lambda: int(page.evaluate(count)) >= 1)
    assert demo.metric("vllm:generation_tokens_total") > before
    kinds = page.locator("#rows th").all_text_contents()
    assert kinds == ["prompt tokens", "roots", "draft tokens"]
    assert page.locator("#costs polyline").count() == 1
    rate, costs = page.locator(".plot").all_text_contents()
    assert "tokens/s" in rate and "120 s ago" in rate and "now" in rate
    assert " ms" in costs and "rows per step" in costs and int(page.text_content("#most-rows"))
    assert page.locator(f"#accepted .source-{COLORS['model']}").text_content() == "model"
    assert page.locator("#blocks tr").count() >= 4


def test_it_paints_at_once(visit):
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
    else done(times);
  };
  requestAnimationFrame(look);
})
"""


def test_200_tokens_a_second_leave_the_page_fluent(visit, demo):
    """A recorded stream is sent again, so fast, while trees are looked at."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 600,
        "ignore_eos": True,
        "return_speculation_details": True,
        "stream_options": {"include_usage": True},
    }
    *recorded, _ = demo.stream("/v1/chat/completions", body)
    here = visit()
    page = here.page
    page.wait_for_selector("#sources input")
    page.evaluate(REPLAY, [recorded, 200])
    page.fill("#prompt", "again")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.assistant .step")
    page.locator(".step").first.click()
    times = page.evaluate(FRAMES)
    assert page.is_visible("#stop")  # it has streamed all the time
    rate = 1000 * (len(times) - 1) / (times[-1] - times[0])
    print(f"{rate:.1f} frames a second")
    assert rate > 50
    page.click("#stop")


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
