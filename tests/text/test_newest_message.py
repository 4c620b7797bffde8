"""The place of a conversation's newest message in its text."""

import pytest

from specserve.text.newest_message import newest_begin

RULES = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": " Why? "}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "image_url"}]}
SAID = {"role": "assistant", "content": "Because."}
CALL = {"role": "assistant", "content": None, "tool_calls": []}
TOOLS = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]


@pytest.mark.parametrize(
    ("messages", "text", "begin"),
    [
        ([RULES, ASKED], "<system>Be brief.<end><user>Why?<end><assistant>", 28),
        ([ASKED, SAID, ASKED], "<user>Why?<end><assistant>Because.<end><user>Why?<end>", 45),
        ([ASKED, SAID, ASKED], "<user>Why?<end><user>Why?<end>", 21),  # the response is dropped
        ([ASKED, CALL, *TOOLS], "<user>Why?<end><call><end><tool>4<end><tool>5<end>", 32),
        ([PARTS, SAID, PARTS], "<user>Look:<end><assistant>Because.<end><user>Look:<end>", 46),
        ([ASKED, SAID], "<user>Why?<end><assistant>Because.", 0),  # the response continues
        ([ASKED], "<user>rewritten<end>", 0),
        ([], "", 0),
    ],
)
def test_the_newest_message_begins_after_the_last_response(messages, text, begin):
    assert newest_begin(messages, text) == begin


def test_many_rewritten_messages_end_the_search():
    messages = [ASKED, SAID] * 20 + [ASKED]
    assert newest_begin(messages, "x" * 100 + "Why?") == 0
