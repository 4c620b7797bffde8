"""The dashboard in a browser."""

import pytest

from tests.server.page.visit import ASKED, QUESTION
from tests.server.server_process import ServerProcess, eventually

TITLES = [
    *("Requests", "Throughput", "TTFT", "TPOT", "Tokens per step", "KV cache in use"),
    "Prefix hit rate",
]


def panel(page, title):
    return page.locator(f".panel[aria-label='{title}']")


def test_the_dashboard_shows_what_the_server_does(visit, demo):
    body = ASKED | {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0.8}
    demo.post("/v1/chat/completions", body)
    here = visit("dashboard")
    page = here.page
    page.wait_for_selector(".panel[aria-label=TTFT] .line", state="attached")
    assert page.locator("#charts .panel[aria-label] h2").all_text_contents() == TITLES
    for title, unit in ("TTFT", "ms"), ("TPOT", "ms"), ("Throughput", "tokens/s"):
        chart = panel(page, title)
        assert unit in chart.locator(".most").text_content()
    plot = panel(page, "Throughput").locator(".plot")
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] - 2, "y": 40})
    tip = panel(page, "Throughput").locator(".tip")
    assert "tokens/s" in tip.text_content() and ":" in tip.text_content()
    page.mouse.move(0, 0)
    assert not tip.is_visible()
    plot.focus()
    page.keyboard.press("ArrowLeft")
    assert tip.is_visible()
    assert page.locator("#by-drafter .swatch").all_text_contents() == ["model"]
    assert "%" in page.text_content("#by-drafter")
    assert page.locator("#by-depth th").first.text_content() == "1"
    assert page.locator("#costs .line").count() == 1 and page.locator("#costs .used").count() >= 1
    assert "ms" in page.text_content("#cost-top") and "mean of the last" in page.text_content(
        "#cost-words"
    )
    assert "Requests ended" in page.text_content("#totals")


@pytest.mark.slow
def test_a_new_server_shows_what_each_panel_will_show(visit, folder):
    with ServerProcess(folder) as server:
        here = visit("dashboard", server=server)
        page = here.page
        page.wait_for_selector("#totals dd")
        empty = page.locator(".panel .empty, .empty-drafts")
        assert empty.count() == len(TITLES) + 2
        assert all(text.startswith("Shows ") for text in empty.all_text_contents())
        assert all(empty.nth(i).is_visible() for i in range(empty.count()))
        server.post("/v1/completions", {"prompt": "the cat", "max_tokens": 30})
        eventually(lambda: panel(page, "TTFT").locator(".line").count() > 0)
        assert not panel(page, "TTFT").locator(".empty").is_visible()
        page.goto("about:blank")


@pytest.mark.slow
def test_the_dashboard_opens_next_to_the_chat(visit):
    here = visit().ready()
    with here.context.expect_page() as opened:
        here.page.click("nav >> text=Dashboard")
    opened.value.wait_for_selector("#totals dd")
    assert here.page.is_visible("#chat")


@pytest.mark.slow
def test_an_open_dashboard_needs_no_key(visit, folder, tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    settings = {"server.api_key_file": str(tmp_path / "keys"), "server.open_dashboard": "true"}
    with ServerProcess(folder, **settings) as server:
        here = visit("dashboard", server=server)
        here.page.wait_for_selector("#totals dd")
        assert not here.page.is_visible("#key-asked")
        here.page.goto("about:blank")
