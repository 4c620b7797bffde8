"""The race in a browser."""

import pytest

DONE = "#verdict:text-matches('Same text|Different')"


def test_a_race_from_the_start_screen_ends_with_the_same_text(visit):
    here = visit().ready()
    page = here.page
    here.set(temperature=0.8, max_tokens=80)
    page.click("#start-race button")
    page.wait_for_selector(DONE)
    words = page.text_content("#verdict")
    texts = page.locator(".lane .text").all_text_contents()
    assert texts[0] == texts[1] != ""
    assert words.startswith(f"Same text: {len(texts[0])} characters.")
    watches = [float(t.split()[0]) for t in page.locator(".watch").all_text_contents()]
    assert all(watches)
    is_clear = "times as fast" in words
    assert page.locator(".lane.first").count() == is_clear
    page.locator(".lane .token").first.click()
    page.wait_for_selector("#tree svg")


def test_different_texts_are_an_error(visit):
    here = visit().ready()
    page = here.page
    page.evaluate("""() => {
      const parse = JSON.parse;
      let number = 0;
      JSON.parse = (text) => {
        const found = parse(text);
        if (found?.choices?.[0]?.delta?.role) number += 1;
        const delta = found?.choices?.[0]?.delta;
        if (number === 2 && delta?.content) delta.content = delta.content.toUpperCase();
        return found;
      };
    }""")
    here.set(temperature=0, max_tokens=20)
    page.click("#start-race button")
    page.wait_for_selector("#verdict.error")
    assert page.text_content("#verdict").startswith("Different texts.")


@pytest.mark.slow
def test_a_race_waits_for_a_chat_and_for_a_prompt(visit, paced):
    with paced() as server:
        here = visit(server=server)
        page = here.page
        here.begin("the cat", seed=50, max_tokens=400)
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
        page.fill("#race-prompt", "the cat")
        page.click("#race-go")
        page.click("#race-stop")
        page.wait_for_selector("#verdict:text-matches('Stopped')")
        server.wait_until_idle()


@pytest.mark.slow
def test_a_seed_below_0_is_drawn_once_for_both_lanes(visit):
    here = visit()
    here.set(temperature=2, seed=-1, max_tokens=40)
    here.page.click("#show-race")
    here.page.click("#race-go")
    here.page.wait_for_selector(DONE)
    assert "Same text" in here.page.text_content("#verdict")
