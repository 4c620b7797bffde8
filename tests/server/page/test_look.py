"""The look of the pages: widths, color schemes, contrast, pictures for the docs.

`make pictures` writes the pictures of docs/pictures.
"""

import base64
import os
from pathlib import Path

import pytest

from tests.server.page.visit import ASKED, PHONE, QUESTION, WIDE, Visit
from tests.server.server_process import ServerProcess

FOLDER = os.environ.get("SPECSERVE_PICTURES")  # a folder to write pictures to
pytestmark = pytest.mark.slow


def serious(page, axe):
    """The serious problems that axe-core finds, with their elements."""
    page.evaluate(axe)
    found = page.evaluate("axe.run()")["violations"]
    worst = [v for v in found if v["impact"] in ("serious", "critical")]
    return [(v["id"], [n["html"][:200] for n in v["nodes"]]) for v in worst]


@pytest.mark.parametrize("path", ["", "race", "dashboard"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_every_width_and_scheme_is_readable(visit, axe, path, scheme, size):
    here = visit("dashboard" if path == "dashboard" else "", color_scheme=scheme)
    page = here.page
    page.set_viewport_size(size)
    page.wait_for_selector("#model:text('demo')")
    if path == "":
        assert serious(page, axe) == []  # the start screen
        here.ask(QUESTION, **ASKED)
        page.locator(".token").last.click()
        page.wait_for_selector("#tree svg", state="attached")
        if size == PHONE:
            page.click("#close-step")
        page.click("#show-settings")
    elif path == "race":
        here.set(max_tokens=20)
        page.evaluate("document.querySelector('#start-race button').click()")
        page.wait_for_selector("#verdict:text-matches('Same')")
    else:
        page.wait_for_selector("#totals dd")
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, color[4:-1].split(","))) < 200) == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert serious(page, axe) == []


def test_the_switch_changes_the_scheme_and_is_kept(visit):
    here = visit(color_scheme="light").ready()
    ground = "getComputedStyle(document.body).backgroundColor"
    light = here.page.evaluate(ground)
    here.page.click("#theme")
    dark = here.page.evaluate(ground)
    assert dark != light
    here.page.reload()
    here.ready()
    assert here.page.evaluate(ground) == dark
    here.page.click("#theme")
    assert here.page.evaluate(ground) == light


def test_on_a_phone_the_tree_opens_over_the_text_and_takes_the_focus(visit, axe):
    here = visit()
    page = here.page
    page.set_viewport_size(PHONE)
    here.ask(QUESTION, **ASKED)
    token, has_focus = page.locator(".token").last, "e => e === document.activeElement"
    for begin, leave in [
        (token.click, lambda: page.click("#close-step")),
        (lambda: page.keyboard.press("Enter"), lambda: page.keyboard.press("Escape")),
    ]:
        begin()
        page.wait_for_selector("#drafting.sheet #tree svg")
        assert page.locator("#tree").evaluate(has_focus)
        sheet, word = page.locator("#drafting").bounding_box(), token.bounding_box()
        assert word["y"] >= 0 and word["y"] + word["height"] <= sheet["y"]
        assert sheet["y"] + sheet["height"] <= PHONE["height"]
        assert serious(page, axe) == []
        leave()
        assert page.locator("#drafting.sheet").count() == 0 and token.evaluate(has_focus)


def test_on_a_phone_conversations_are_behind_a_button(visit):
    here = visit()
    page = here.page
    page.set_viewport_size(PHONE)
    here.ask(QUESTION, **ASKED)
    assert not page.is_visible("#new")
    page.click("#show-sidebar")
    page.click("#new")
    page.wait_for_selector("#new", state="hidden")
    assert page.locator(".message").count() == 0


def test_padded_models_are_named_and_the_pictures_are_taken(browser):
    settings = {"memory.kv_bytes": 1 << 30, "server.served_model_name": "specserve-demo"}
    with ServerProcess(None, "--demo-compute=qwen3-0.6b", **settings) as server:
        assert "demo: specserve-demo, padded to qwen3-0.6b compute (same text)" in server.said
        for scheme in ("light", "dark"):
            here = Visit(browser, server.url, color_scheme=scheme).ready()
            note = here.page.text_content("#scaled")
            assert "specserve-demo, padded to qwen3-0.6b compute" in note
            if FOLDER:
                take_pictures(here, scheme)
            here.close()


def take_pictures(here, scheme):
    page = here.page
    page.set_viewport_size({"width": 1180, "height": 720})
    picture(page, f"page-start-{scheme}")
    here.set(temperature=0, seed=1)
    for _ in range(2):  # the server first measures its steps
        page.click("#show-race")
        page.click("#race-go")
        page.wait_for_selector("#race-go", state="visible")
    picture(page, f"page-race-{scheme}")
    page.click("#show-chat")
    here.ask("What does re.sub do?")
    here.ask("Show the signature of shutil.copytree.")
    page.locator(".token.draft").nth(9).click()
    page.wait_for_selector("#tree svg")
    picture(page, f"page-chat-{scheme}")
    page.goto(here.url + "/dashboard")
    page.wait_for_selector(".panel[aria-label=TPOT] .line", state="attached")
    page.set_viewport_size({"width": 1180, "height": 980})
    page.wait_for_timeout(3500)  # until the next sample
    picture(page, f"page-dashboard-{scheme}")


def picture(page, name):
    """Write a screenshot as WebP, which takes a quarter of a PNG's bytes."""
    page.wait_for_timeout(500)
    session = page.context.new_cdp_session(page)
    shot = session.send("Page.captureScreenshot", {"format": "webp", "quality": 60})
    (Path(FOLDER) / f"{name}.webp").write_bytes(base64.b64decode(shot["data"]))
