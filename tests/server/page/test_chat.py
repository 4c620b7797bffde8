"""The chat page in a browser: start, responses, settings, drafting."""

import json

import pytest

from tests.server.page.visit import ASKED, QUESTION, steps_of
from tests.server.server_process import ServerProcess

COLORS = {"ngram": 0, "model": 1, "grammar": 2, "prediction": 3}  # of the sources, on every page
# What the demo models must begin a response to each sample with, at a temperature of 0
WANTED = {
    "What does re.sub do?": "Return the string obtained by replacing the leftmost non-overlapping",
    "What does urllib.parse.unquote do?": "Replace %xx escapes by their single-character",
    "Show the signature of shutil.copytree.": "```python\nshutil.copytree(src, dst",
    "What does subprocess.check_call do?": "Run command with arguments.",
}


def color_of(name):
    colors = [part for part in name.split() if part.startswith("source-")]
    return int(colors[0].removeprefix("source-")) if colors else None


def test_the_start_shows_the_model_and_samples_that_it_answers(visit, demo):
    here = visit().ready()
    page = here.page
    assert page.text_content("#start-name") == "demo"
    facts = page.text_content("#start-memory")
    assert "MB of weights" in facts and "context of 8,192 tokens" in facts
    assert page.locator("#start-drafters .swatch").all_text_contents() == ["model"]
    assert not page.is_visible("#settings") and not page.is_visible("#drafting")
    samples = page.locator("#samples .sample span").all_text_contents()
    assert samples == [*WANTED]
    for sample, begin in WANTED.items():
        asked = {"messages": [{"role": "user", "content": sample}], "temperature": 0}
        [choice] = demo.post("/v1/chat/completions", asked | {"max_tokens": 99}).body["choices"]
        assert choice["message"]["content"].startswith(begin)
    page.click("#samples .sample >> nth=0")
    page.wait_for_selector("#log[data-ended]")
    assert page.locator(".message.user .text").text_content() == samples[0]
    assert not page.is_visible("#start")


def test_another_model_has_general_samples_and_advice_for_speed(visit, server):
    here = visit(server=server).ready()
    page = here.page
    assert "hash map" in page.text_content("#samples")
    assert "--draft-model" in page.text_content("#advice code >> nth=-1")
    assert page.get_attribute("#show-drafting", "aria-checked") == "false"


def test_tokens_have_the_color_of_their_drafter(visit, demo):
    here = visit()
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
        ".message.assistant .token", "all => all.map(s => [s.textContent, s.className])"
    )
    assert [(t, color_of(name)) for t, name in shown] == want
    assert {color for _, color in want} > {None}
    here.page.click("#show-drafting")
    assert here.page.locator(".token").count() == 0 and here.text() == text
    assert not here.page.is_visible("#drafting")
    here.page.click("#show-drafting")
    assert here.page.locator(".token").count() == len(want)


def test_a_click_shows_the_tree_of_a_step(visit):
    here = visit()
    steps = steps_of(here.ask(QUESTION, **ASKED))
    number = max(range(len(steps)), key=lambda i: len(steps[i]["tree"]["accepted"]))
    tree = steps[number]["tree"]
    here.page.click(f".token[data-step='{number}'] >> nth=0")
    here.page.wait_for_selector(f"#tree-words:text-matches('Step {number + 1}:')")
    counts = [here.page.locator(f"#tree {one}").count() for one in ("rect", "text.accepted-text")]
    assert counts == [1 + len(tree["tokens"]), 1 + len(tree["accepted"])]
    assert here.page.locator("#tree text.rejected-text").count() == counts[0] - counts[1]
    assert f"{len(tree['accepted'])} accepted" in here.page.text_content("#tree-words")


def test_a_line_shows_the_speed(visit):
    here = visit()
    events = here.ask(QUESTION, **ASKED)
    [last] = [e for e in events if e != "[DONE]" and "timings" in e]
    here.page.wait_for_selector(".speed .tokens")
    shown = dict(
        here.page.eval_on_selector_all(
            ".speed .figure", "all => all.map(s => [s.classList[1], [s.textContent, s.title]])"
        )
    )
    assert shown["tokens"][0] == f"{last['timings']['predicted_n']} tokens"
    steps = last["metrics"]["speculative_decoding"]["mean_acceptance_length"]
    assert shown["step"][0] == f"{steps:.2f} tokens/step"
    assert shown["rate"][0].endswith("tokens/s") and "first token" in shown["ttft"][1]


def test_the_defaults_are_shown_and_sent(visit):
    here = visit()
    page = here.page
    with page.expect_request("**/v1/chat/completions") as sent:
        here.ask(QUESTION)
    body = json.loads(sent.value.post_data)
    defaults = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05, "max_tokens": 2048}
    assert {name: body[name] for name in defaults} == defaults
    shown = {n: page.get_attribute(f"#controls [name={n}]", "placeholder") for n in defaults}
    assert shown == {"temperature": "0.7", "top_p": "0.95", "min_p": "0.05", "max_tokens": "2,048"}
    assert page.get_attribute("#controls [name=seed]", "placeholder") == "random"


@pytest.mark.slow
def test_the_settings_are_sent_and_kept(visit):
    here = visit().ready()
    page = here.page
    page.click("#show-settings")
    names = page.eval_on_selector_all("#sources input", "all => all.map(box => box.name)")
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
    page.reload()
    here.ready()
    controls = ASKED | {"max_nodes": 3, "system": "Be brief."}
    shown = {name: page.input_value(f"#controls [name={name}]") for name in controls}
    assert shown == {name: str(value) for name, value in controls.items()}
    assert not page.is_checked("#sources input[name=model]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "typed", "error"),
    [
        ("temperature", "3", "Temperature: set a number from 0 to 2"),
        ("temperature", "0.00001", "Temperature: "),  # refused by the server
        ("max_nodes", "1.5", "Draft tokens per step: set a whole number from 0 to"),
        ("max_tokens", "0", "Max tokens: set a whole number of at least 1"),
        ("seed", "1e99", "Seed: set a whole number of at least -1"),
        ("seed", "-", "Seed: set a whole number of at least -1"),
    ],
)
def test_a_wrong_setting_is_named_and_leaves_the_message_in_the_box(visit, control, typed, error):
    here = visit().ready()
    page = here.page
    page.click("#show-settings")
    page.locator(f"#controls [name={control}]").press_sequentially(typed)
    page.fill("#prompt", "a question")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#error:text-matches('.')")
    assert page.text_content("#error").startswith(error)
    assert page.input_value("#prompt") == "a question"
    assert page.locator(".message").count() == 0 == len(here.kept())
    here.complaints.clear()  # the browser reports a status 400
    here.ask("a question", **ASKED | {control: ""})
    assert page.text_content("#error") == ""


@pytest.mark.slow
def test_a_limit_of_another_server_is_removed(visit, folder):
    with ServerProcess(folder, "--drafter=none") as server:
        here = visit(server=server)
        kept = json.dumps({"values": {"max_nodes": "8"}})
        here.page.evaluate("kept => localStorage.setItem('specserve.settings', kept)", kept)
        here.page.reload()
        here.ready()
        assert "Drafting is off" in here.page.text_content("#start-drafters")
        here.ask("the cat", temperature=0, max_tokens=5)
        assert here.page.input_value("#controls [name=max_nodes]") == ""


@pytest.mark.slow
def test_the_keyboard_is_enough(visit):
    here = visit().ready()
    page = here.page
    page.keyboard.press("?")
    assert "New conversation" in page.text_content("#help")
    page.keyboard.press("Escape")
    assert not page.is_visible("#help")
    page.keyboard.press("/")
    page.keyboard.type("What does os.path.join return?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#log[data-ended]")
    here.reach(".token")
    page.wait_for_selector("#tree-words:text-matches('Step 1:')")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#tree-words:text-matches('Step 2:')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#tree-words:text-matches('Step 1:')")
    for key, shown in ("r", "#race"), ("c", "#chat"), (",", "#settings"):
        page.keyboard.press(key)
        assert page.is_visible(shown)
    page.keyboard.press("Escape")
    assert not page.is_visible("#settings")
    page.keyboard.press("s")
    assert page.evaluate("document.activeElement.id") == "search"
    here.reach("#show-race")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.is_visible("#race") and not page.is_visible("#chat")


def test_a_drafter_has_one_color_wherever_it_is_listed(visit):
    here = visit()
    names = [*COLORS, "a.b:Own", "a.b:Other"]
    colors = here.page.evaluate(
        "names => import('/page/shared/drafters.js').then(d => names.map(d.colorOf))", names
    )
    assert colors[: len(COLORS)] == [f"source-{place}" for place in COLORS.values()]
    assert {*colors[len(COLORS) :]} <= {"source-4", "source-5"}
    look = "c => getComputedStyle(document.body.appendChild(Object.assign("
    look += "document.createElement('i'), { className: `draft ${c}` })))"
    for part in ".backgroundColor", ".textDecorationColor":
        assert len({here.page.evaluate(look + part, f"source-{place}") for place in range(6)}) == 6
    parts = ".textDecorationStyle", ".textDecorationLine"
    lines = {tuple(here.page.evaluate(look + x, f"source-{p}") for x in parts) for p in range(6)}
    assert len(lines) == 6  # drafters differ without color
