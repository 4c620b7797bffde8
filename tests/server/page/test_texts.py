"""Markdown of models in a browser, and texts that attack the page."""

import pytest

from tests.server.page.visit import COMPLETE, QUESTION

TEXT = "document.querySelector('.message.assistant .text')"
MARKDOWN = """# Title

Some **bold**, *italic*, \\*a* \\_b_, ~~old~~ and `code` with [a link](https://example.com/a).

- one
- two
  1. inner
  2. more

| a | b |
|---|--:|
| 1 | `2` |

> quoted

```python
def f():
    return "<b>"
```
---
the end https://example.com/b."""


def shown(here, text):
    """Have the page show a text; its element's HTML."""
    here.ready()
    here.answers(text)
    here.page.fill("#prompt", "a")
    here.page.press("#prompt", "Enter")
    here.page.wait_for_selector(COMPLETE)
    return here.page.evaluate(f"{TEXT}.innerHTML")


def count(here, selector):
    return here.page.locator(f".message.assistant .text {selector}").count()


def test_markdown_is_rendered(visit):
    here = visit()
    shown(here, MARKDOWN)
    counts = {
        **{"h3": 1, "strong": 1, "em": 1, "del": 1, "p > code": 1, "ul > li": 2, "ol > li": 2},
        **{"th": 2, "td": 2, "td.side-right code": 1, "blockquote": 1, "hr": 1, "pre code": 1},
        "a[href^='https://example.com/'][rel~=noopener]": 2,
    }
    assert {selector: count(here, selector) for selector in counts} == counts
    code = here.page.text_content(".message.assistant pre code")
    assert code == 'def f():\n    return "<b>"'
    streamed = here.page.evaluate(f"{TEXT}.innerHTML")
    here.page.reload()
    here.page.wait_for_selector(".message.assistant pre")
    assert here.page.evaluate(f"{TEXT}.innerHTML") == streamed  # the same in one piece


GROWING = """
([text, hasColors]) => Promise.all(['text_view', 'answer'].map(n => import(`/page/chat/${n}.js`)))
  .then(([{ TextView }, { Answer }]) => {
    const answer = new Answer(), boxes = [0, 1].map(() => document.createElement('div'));
    const [grown, whole] = boxes.map((box) => new TextView(box, { hasColors }));
    document.body.append(...boxes);
    const different = [];
    let first = null;
    for (let end = 0; end < text.length; end += 3) {
      answer.append(text.slice(end, end + 3));
      const step = answer.steps.push({ at: 0 }) - 1;
      answer.tokens.push({ end: answer.length, step, bits: step % 2 });
      grown.answer = whole.answer = answer;
      grown.draw();
      whole.again();
      first ??= grown.box.querySelector('.token') ?? grown.box.firstChild.firstChild;
      if (grown.box.innerHTML !== whole.box.innerHTML) different.push(answer.text);
    }
    const isKept = first.isConnected;
    for (const box of boxes) box.remove();
    return { different, isKept };
  })
"""


@pytest.mark.parametrize("has_colors", [False, True])
def test_a_growing_text_is_drawn_like_a_whole_one_and_keeps_its_elements(visit, has_colors):
    here = visit().ready()
    sources = "Some **bold** text that grows.\n" * 3, MARKDOWN
    kept, other = (here.page.evaluate(GROWING, [text, has_colors]) for text in sources)
    assert kept == {"different": [], "isKept": True}  # for clicks, selections and the focus
    assert other["different"] == []


HOSTILE = {
    "HTML": "<b>x</b><img src=x onerror=alert(1)><iframe src=//a.b></iframe>",
    "a script": "<script>window.hit = 1</script>\n\n<svg onload='window.hit = 1'>",
    "a link": "[x](javascript:window.hit=1) [y](data:text/html,z) [z](java\tscript:a)",
    "an image": "![x](https://example.com/x.png)",
    "code": "```<script>\n</code></pre><b>x</b>\n```",
    "right to left": "\u05e9\u05dc\u05d5\u05dd \u202eabc\u202c world",
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600 **\U0001f680 bold**",
    "a long line": "x" * 20_000,
    "openers": "*a" * 4000 + "[" * 4000 + "`" * 3000 + "> " * 2000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts_are_texts(visit, text):
    here = visit(color_scheme="light")
    html = shown(here, text)
    tags = "script, img, iframe, svg:not(.icon), b, object, form, input, [onerror], [onload]"
    assert count(here, f":is({tags})") == 0
    hrefs = here.page.eval_on_selector_all(".text a", "all => all.map(a => a.href)")
    assert all(href.startswith("https://example.com/") for href in hrefs)
    assert here.page.evaluate("window.hit") is None
    assert here.page.evaluate("document.documentElement.scrollWidth") <= 1280
    if "<b>" in text:
        assert "&lt;b&gt;" in html
    if "\U0001f680" in text:
        assert here.page.text_content(".text strong") == "\U0001f680 bold"


def test_tokens_with_wide_characters_are_cut_at_their_ends(visit):
    here = visit().ready()
    cut = here.page.evaluate("""() => import('/page/chat/answer.js').then(({ Answer }) => {
      const answer = new Answer();
      answer.append('a\\u{1f600}b\\u{1f680}c');
      answer.tokens = [2, 3, 5].map((end, step) => ({ end, step, bits: 0 }));
      const { text } = answer;
      return [...answer.pieces(0, text.length)].map(p => text.slice(p.from, p.to));
    })""")
    assert cut == ["a\U0001f600", "b", "\U0001f680c"]


@pytest.mark.slow
def test_a_long_stream_of_one_block_keeps_its_tokens(visit):
    """The tokens' texts are the response's text, except for signs of Markdown."""
    here = visit()
    here.ask(QUESTION, temperature=0, max_tokens=200)
    pieces = here.page.locator(".message.assistant .token").all_text_contents()
    assert "".join(pieces) == here.text()
