"""Finds the text that a chat template writes after an assistant's message, by rendering one.

A template could loop endlessly or fill the memory, so a process with limits renders it.
"""

import resource
import subprocess
import sys
from functools import lru_cache

import msgspec

from specserve.errors import RequestError
from specserve.process import die_with_parent
from specserve.text.chat_template import ChatOptions, ChatTemplate

MAX_MEMORY = 1 << 29  # bytes of address space
MAX_CPU = 1  # seconds of CPU time
MAX_WAIT = 20  # seconds, including the start of the process on a busy machine
MAX_TEXT = 1000  # characters
ANSWER = "specserve-answer"  # a text that templates do not contain
ASKED = {"role": "user", "content": "Hi"}
ANSWERED = [ASKED, {"role": "assistant", "content": ANSWER}]


def text_after_answer(template: ChatTemplate) -> str:
    """The text after an assistant's message; "" if there is none, or if rendering fails."""
    return text_of(msgspec.msgpack.encode(template))


@lru_cache(maxsize=8)
def text_of(encoded: bytes) -> str:
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=encoded, capture_output=True, timeout=MAX_WAIT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode() if done.returncode == 0 else ""


def written(template: ChatTemplate) -> str:
    """Render the template, and return the text after an assistant's message. Some templates do not
    end the last message, so an earlier message is tried, too.
    """
    for messages in (ANSWERED, [*ANSWERED, ASKED]):
        try:
            text = template.render(messages, ChatOptions(add_generation_prompt=False))
        except RequestError:
            continue
        _, _, after = text.rpartition(ANSWER)
        if after.strip() and ANSWER in text:
            return after.lstrip()[:MAX_TEXT]
    return ""


def main() -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU, MAX_CPU))
    template = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ChatTemplate)
    sys.stdout.buffer.write(written(template).encode(errors="replace"))


if __name__ == "__main__":
    main()
