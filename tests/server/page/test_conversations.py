"""Conversations in the browser: kept, edited, searched, renamed, deleted, exported, imported."""

import json

import pytest

from tests.server.page.visit import ASKED, COMPLETE, QUESTION

EDIT, AGAIN = "[aria-label=Edit]", "[aria-label=Regenerate]"


def test_conversations_are_kept_regenerated_renamed_searched_and_deleted(visit):
    here = visit()
    page = here.page
    here.ask(QUESTION, **ASKED)
    first = here.text()
    page.click(AGAIN)
    page.wait_for_selector(COMPLETE)
    assert here.text() == first and page.locator(".message").count() == 2
    page.reload()
    here.ready()
    assert here.text() == first
    page.click("#new")
    here.ask("What does os.walk do?", **ASKED)
    assert page.locator("#kept li").count() == 2
    page.fill("#search", "COPYTREE")
    assert page.locator("#kept .title span").all_text_contents() == [QUESTION]
    page.hover("#kept li")
    page.click(f"[aria-label^='Rename {QUESTION}']")
    page.fill("#kept input", "Trees")
    page.press("#kept input", "Enter")
    page.fill("#search", "")
    titles = page.locator("#kept .title span").all_text_contents()
    assert titles == ["What does os.walk do?", "Trees"]
    page.click("#kept .title:has-text('Trees')")
    assert here.text() == first
    page.hover("#kept li:has-text('Trees')")
    page.click("[aria-label^='Delete Trees']")
    assert page.locator("#kept li").count() == 1 and page.locator(".message").count() == 0


def test_an_edited_message_replaces_the_later_ones(visit):
    here = visit()
    page = here.page
    here.ask(QUESTION, **ASKED)
    first = here.text()
    page.fill("#prompt", "a draft")
    for leave in (lambda: page.click("#cancel"), lambda: page.press("#prompt", "Escape")):
        page.click(EDIT)
        assert page.input_value("#prompt") == QUESTION and page.locator(".message").count() == 0
        assert page.text_content("#status").startswith("Editing a message")
        leave()
        assert page.input_value("#prompt") == "a draft" and here.text() == first
        assert not page.is_visible("#cancel") and page.text_content("#status") == ""
    page.click(EDIT)
    here.ask("a")
    assert page.locator(".message.user .text").all_text_contents() == ["a"]
    assert page.locator("#kept li").count() == 1


def test_a_response_is_copied_as_markdown(visit):
    here = visit(permissions=["clipboard-read", "clipboard-write"]).ready()
    text = "A **bold** word.\n\n```py\nx = 1\n```\n"
    here.answers(text)
    here.page.fill("#prompt", "a")
    here.page.press("#prompt", "Enter")
    here.page.wait_for_selector(COMPLETE)
    for button, copied in ("Copy code", "x = 1"), ("Copy", text):
        here.page.click(f".message.assistant [aria-label='{button}']")
        here.page.wait_for_selector(".message.assistant [aria-label=Copied]")
        assert here.page.evaluate("navigator.clipboard.readText()") == copied


@pytest.mark.slow
def test_an_export_is_imported_elsewhere(visit, tmp_path):
    here = visit()
    here.ask(QUESTION, **ASKED)
    with here.page.expect_download() as download:
        here.page.click("#export")
    download.value.save_as(tmp_path / "kept.json")
    there = visit().ready()
    there.page.set_input_files("#import-file", tmp_path / "kept.json")
    there.page.wait_for_selector("#import-result:text-matches('Imported 1 conversation')")
    assert there.kept() == here.kept()
    there.page.click("#kept .title")
    assert there.text() == here.text()
    for text in "{", json.dumps({"conversations": 3}), "[]":
        (tmp_path / "odd.json").write_text(text)
        there.page.set_input_files("#import-file", tmp_path / "odd.json")
        there.page.wait_for_selector("#import-result:text-matches('This file')")
        there.page.evaluate("document.querySelector('#import-result').textContent = ''")
    assert len(there.kept()) == 1


@pytest.mark.slow
def test_two_tabs_lose_no_response(visit):
    here = visit()
    here.ask(QUESTION, **ASKED)
    there = here.context.new_page()
    there.goto(here.url)
    there.wait_for_selector("#samples .sample")
    assert there.locator(".message").count() == 0
    there.fill("#prompt", "another question")
    there.press("#prompt", "Enter")
    there.wait_for_selector(COMPLETE)
    here.ask("a third one", **ASKED)
    assert here.page.locator("#kept li").count() == 2
    here.page.reload()
    assert here.page.locator(".message").count() == 4


@pytest.mark.slow
@pytest.mark.parametrize("place", ["conversations", "settings", "open", "theme"])
def test_unreadable_entries_of_the_storage_are_skipped(visit, place):
    here = visit()
    entries = [
        *("{", "{}", "[1]", "null", '{"values": 3, "off": 3}', '[{"id": 1}]'),
        '{"values": {"seed": 1, "max_nodes": "a"}}',
        '[{"id": "a", "messages": 3}]',
        '[{"id": "a", "title": 3, "messages": []}]',
    ]
    keep = "([place, kept]) => { localStorage.setItem('specserve.' + place, kept);"
    keep += " sessionStorage.setItem('specserve.' + place, kept) }"
    for kept in entries:
        here.page.evaluate(keep, [place, kept])
        here.page.reload()
        here.ready()
        assert here.page.locator("#kept li").count() == 0
    here.ask(QUESTION, **ASKED)
    assert here.page.locator("#kept li").count() == 1
