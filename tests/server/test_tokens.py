"""Over HTTP: ids that the model lacks, prompts that are too long, and templates that never end."""

import asyncio
import contextlib
import signal
import socket
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import msgspec
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from specserve.api.input_processor import TextFiles, make_input_processor
from specserve.config import Config, ServerConfig
from specserve.errors import PromptTooLong
from specserve.server.completion import Service
from specserve.server.prompt import NUM_PROCESSES
from specserve.text.defaults import GenerationDefaults
from specserve.text.tokenizer import Tokenizer
from tests.checkpoints import PAD, add_token_beyond, tiny_checkpoint, tiny_tokenizer
from tests.server.asking import CHAT, COMPLETIONS, saying, started
from tests.server.in_process import server_threads
from tests.server.server_process import ServerProcess, eventually

BEYOND = "<|320|>"
STUCK = """
{%- if messages[0].content == "power" -%}{{ (8 + messages | length) ** (9 ** 9) }}{%- endif -%}
{%- for message in messages -%}{{ message.role }}: {{ message.content }}{%- endfor -%}
"""


def begin_texts(folder):
    """Have the tokenizer add a token to the beginning of texts."""
    path = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    added = [(PAD, tokenizer.token_to_id(PAD))]
    tokenizer.post_processor = TemplateProcessing(single=f"{PAD} $A", special_tokens=added)
    tokenizer.save(path)


def chat_with(content):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tokens"), seed=1)
    assert add_token_beyond(folder) == BEYOND
    begin_texts(folder)
    (folder / "chat_template.jinja").write_text(STUCK)
    settings = {"server.template_seconds": 0.5}
    with ServerProcess(folder, "--served-model-name=tiny", **settings) as server:
        server.folder = folder
        yield server
        assert server.process.poll() is None, "a request has ended the server"


REFUSED = {  # path, body -> the field that is named
    "text": (COMPLETIONS, {"prompt": f"the {BEYOND}"}, "prompt"),
    "one of several": (COMPLETIONS, {"prompt": ["the", BEYOND]}, "prompt"),
    "ids": (COMPLETIONS, {"prompt": [1, 320]}, "prompt"),
    "a message": (CHAT, chat_with(f"the {BEYOND}"), "messages"),
    "a text to count": ("/tokenize", {"prompt": BEYOND}, "prompt"),
    "a message to count": ("/tokenize", {"messages": chat_with(BEYOND)["messages"]}, "messages"),
    "ids to decode": ("/detokenize", {"tokens": [1, 320]}, "tokens"),
    "a stop id": (COMPLETIONS, {"prompt": "the", "stop_token_ids": [320]}, "stop_token_ids"),
}


def test_a_token_that_the_model_has_no_embedding_of_ends_its_own_request_only(server):
    with server.open_stream(COMPLETIONS, saying(200)) as events:
        next(events)
        for path, body, field in REFUSED.values():
            answer = server.post(path, body)
            error = answer.body["error"]
            assert (answer.status, error["param"]) == (400, field), (path, body)
            assert f"{BEYOND!r} has the id 320" in error["message"]
            assert "[0, 320)). Omit the token" in error["message"]
            assert path != "/detokenize" or error["message"].startswith("tokens: the token")
        assert list(events)[-1] == "[DONE]"


def test_an_end_that_the_model_cannot_say_does_no_harm(server):
    answer = server.post(COMPLETIONS, {"prompt": "the", "max_tokens": 4})
    assert answer.status == 200


def test_templates_that_are_stuck_in_c_leave_other_chats_and_all_tokenizing_alone(server):
    ask = partial(server.post, CHAT, chat_with("power"))

    async def run():
        stuck = [asyncio.create_task(asyncio.to_thread(ask)) for _ in range(2)]
        others = [
            asyncio.create_task(asyncio.to_thread(server.post, path, body))
            for path, body in (
                (CHAT, chat_with("hi")),
                ("/tokenize", {"prompt": "the cat"}),
                (COMPLETIONS, {"prompt": "the cat", "max_tokens": 2}),
            )
        ]
        return await asyncio.gather(*stuck), await asyncio.gather(*others)

    for _ in range(2):
        stuck, others = asyncio.run(run())
        assert [answer.status for answer in others] == [200] * 3
        for answer in stuck:
            assert answer.status == 400
            assert "ran for more than 0.5 s" in answer.body["error"]["message"]


@pytest.mark.timed
def test_chats_whose_clients_have_left_hold_up_no_other_chat(server):
    """Each would take a process to its deadline, half a second."""
    body = msgspec.json.encode(chat_with("power"))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(16):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head.encode() + body)
    start = perf_counter()
    assert server.post(CHAT, chat_with("hi")).status == 200
    assert perf_counter() - start < 16 / NUM_PROCESSES * 0.5 / 2


def test_more_chats_than_may_wait_are_refused(tmp_path):
    folder = tiny_checkpoint(tmp_path, seed=1)
    (folder / "chat_template.jinja").write_text(STUCK)
    settings = {"server.template_seconds": 60, "server.max_queued_requests": 3}
    with (
        server_threads(folder, **settings) as server,
        contextlib.ExitStack() as clients,
    ):
        body = msgspec.json.encode(chat_with("power"))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(3):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(head.encode() + body)
        eventually(lambda: server.post(COMPLETIONS, {"prompt": "the"}).status == 503)
        answer = server.post(CHAT, chat_with("hi"))
        assert answer.status == 503 and "3 requests are waiting" in answer.body["error"]["message"]


def test_the_templates_processes_end_with_the_server_even_in_the_middle_of_a_template(server):
    with (
        ServerProcess(server.folder, **{"server.template_seconds": 60}) as other,
        started(other, chat_with("power"), CHAT),
    ):
        pids = other.children("specserve.server.template_process")
        assert len(pids) == 2
        eventually(lambda: max(map(cpu_ticks, pids)) > 40)  # one is at it
        other.signal(signal.SIGKILL)
        eventually(lambda: not any(map(is_running, pids)))


def fields_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def cpu_ticks(pid):
    return int(fields_of(pid)[11])


def is_running(pid):
    try:
        return fields_of(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("given", [None, True, False])
def test_special_tokens_are_added_to_a_prompt_and_not_to_a_chat_unless_asked(server, given):
    asked = {} if given is None else {"add_special_tokens": given}
    talk = {"messages": [{"role": "user", "content": "the cat"}]}
    ids = tiny_tokenizer()("user: the cat")["input_ids"]
    for path, body, own in ((COMPLETIONS, {"prompt": "user: the cat"}, True), (CHAT, talk, False)):
        told = server.post("/tokenize", body | asked).body["tokens"]
        assert told == [0] * (own if given is None else given) + ids
        answer = server.post(path, body | asked | {"max_tokens": 1, "return_token_ids": True}).body
        place = answer if path == CHAT else answer["choices"][0]
        assert place["prompt_token_ids"] == told


class Counting(Tokenizer):
    def __init__(self):
        super().__init__(tiny_tokenizer().backend_tokenizer)
        self.asked = []

    def encode(self, text, add_special_tokens=True):
        self.asked.append(text)
        return super().encode(text, add_special_tokens)


def service_with(tokenizer, **limits):
    """A service whose engine is never reached."""
    service = Service(Config(server=ServerConfig(**limits)), SimpleNamespace())
    processor = make_input_processor(TextFiles(tokenizer, GenerationDefaults()), 320, 32)
    service.prompts.loaded = processor
    return service


def test_prompts_after_the_first_that_is_too_long_are_not_tokenized():
    tokenizer = Counting()
    service = service_with(tokenizer)
    with pytest.raises(PromptTooLong) as e:
        asyncio.run(service.prompts.read_all(["the cat", "x" * 40, "later", "still later"]))
    assert e.value.param == "prompt"
    assert tokenizer.asked == ["the cat", "x" * 40]


def test_ids_that_are_too_many_are_refused_before_any_text_is_tokenized():
    tokenizer = Counting()
    with pytest.raises(PromptTooLong):
        asyncio.run(service_with(tokenizer).prompts.read_all(["the cat", [1] * 40]))
    assert tokenizer.asked == []
