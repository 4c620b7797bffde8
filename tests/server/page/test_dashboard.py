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
    assert page.locator("#by-depth .share").count() == page.locator("#by-depth .bar-fill").count()
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


NAMES = [
    *("running", "waiting", "kv_usage", "tokens_per_second", "tokens_per_step"),
    *("ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "tpot_ms_p95", "prefix_hit_rate"),
]


def test_failures_and_restarts_are_marks_and_a_pause_keeps_the_last_values(visit, demo):
    empty = {"errors": 0, "restarts": 0} | dict.fromkeys(NAMES)
    first = empty | dict.fromkeys(NAMES, 0.5) | {"at": 900.0}
    second, third = (empty | {"at": at, "tokens_per_second": 0.0} for at in (950.0, 990.0))
    shown = [first, second | {"errors": 2, "restarts": 1}, third]
    history = {"now": 1000.0, "interval_seconds": 3, "samples": shown, "step_rows": {}}
    here = visit()
    page = here.page
    page.route("**/metrics/history*", lambda route: route.fulfill(json=history))
    page.goto(here.url + "/dashboard")
    for title in TITLES:
        for kind in "failure", "restart":
            mark = panel(page, title).locator(f".mark.{kind}")
            mark.first.wait_for(state="attached")
            assert mark.get_attribute("d") == "M850.0 0V100"
    assert panel(page, "TTFT").locator(".values").text_content() == "p50 0.50 ms · p95 0.50 ms"
    assert panel(page, "Throughput").locator(".values").text_content() == "0 tokens/s"
    for title, words in ("Throughput", ["2 failed", "engine restarted"]), ("TTFT", ["p50 0.50 ms"]):
        plot = panel(page, title).locator(".plot")
        box = plot.bounding_box()
        plot.hover(position={"x": box["width"] * 850 / 900, "y": 40})
        tip = panel(page, title).locator(".tip").text_content()
        assert all(each in tip for each in words)


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
