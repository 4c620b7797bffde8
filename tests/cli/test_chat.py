"""`specserve chat`: what is said, kept and printed, whoever answers and however it ends."""

import contextlib
import inspect
import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from specserve import LLM, SamplingParams
from specserve.cli import chat as cli_chat
from specserve.cli import command as cli
from specserve.cli.chat import AnswerStatistics, ChatSession, LocalModel
from specserve.cli.remote import CUT, events
from specserve.errors import ConfigError, PromptTooLong, RequestError
from specserve.text.defaults import GenerationDefaults
from tests.checkpoints import tiny_checkpoint
from tests.server.server_process import SETTINGS, ServerProcess, eventually

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"
NUMBERS = {
    "usage": {"completion_tokens": 4},
    "metrics": {
        "time_to_first_token_ms": 40.0,
        "generation_time_ms": 60.0,
        "speculative_decoding": {"num_draft_tokens": 3, "mean_acceptance_length": 1.5},
    },
}
NOT_DRAFTED = {"num_draft_tokens": 0, "mean_acceptance_length": 1.0}
GREEDY = ["--temperature=0", "--max-tokens=12"]
SETS = [f"--set={key}={value}" for key, value in SETTINGS.items()]


def chunk(text=None, reason=None):
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": reason}
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()


def event(data):
    return b"data: %b\n\n" % json.dumps(data).encode()


def says(text, numbers=NUMBERS):
    return HEAD + chunk(text) + chunk(None, "stop") + event({"choices": []} | numbers) + DONE


ODD_STEP = event(
    {
        "choices": [
            {
                "delta": {},
                "speculation": {
                    "steps": [
                        {
                            "tokens": [1],
                            "ends": [1, 2],
                            "sources": [1],
                            "tree": {"tokens": [], "parents": [], "sources": [], "accepted": []},
                        }
                    ]
                },
            }
        ]
    }
)


class Wire:
    """A server that knows one model, answers as it is told, and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked, self.keys = list(answers), [], []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.serve)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)  # it wakes who accepts
        self.listener.close()
        self.thread.join()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                with connection, connection.makefile("rb") as lines:
                    connection.sendall(self.answer(lines))

    def answer(self, lines):
        first, *rest = iter(lines.readline, b"\r\n")
        headers = dict(line.decode().strip().lower().split(": ") for line in rest)
        self.keys.append(headers.get("authorization"))
        if first == b"GET /v1/models HTTP/1.1\r\n":
            return HEAD + json.dumps({"data": [{"id": "one"}]}).encode()
        self.asked.append(json.loads(lines.read(int(headers["content-length"]))))
        return self.answers.pop(0) if self.answers else b""


class Script:
    """Says the pieces of one list after the other; an exception among them is raised."""

    name, colored = "script", None

    def __init__(self, *answers):
        self.answers, self.heard = list(answers), []

    def stream_answer(self, messages):
        self.heard.append([m["content"] for m in messages])
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield piece
        return AnswerStatistics("stop")


@pytest.fixture
def talk(monkeypatch, capsys):
    """Run the command with these lines on stdin: its exit code, stdout and stderr."""

    def run(lines, *args):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return cli.main(["chat", *args]), *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(
        tmp_path_factory.mktemp("talks"), seed=1, max_position_embeddings=4096, eos_token_id=319
    )


@pytest.fixture(scope="module")
def server(folder):
    with ServerProcess(folder, "--served-model-name=tiny", "--drafter=none") as server:
        yield server


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, set=SETTINGS, progress=False) as llm:
        yield llm


def test_every_turn_sends_all_that_was_said_and_the_options(talk):
    with Wire(says("Hi."), says("Bye.")) as wire:
        flags = ["--system=Short.", "--max-tokens=9", "--temperature=0.5", "--seed=7"]
        code, out, _ = talk(["Hello", "", "Leave"], "--url", wire.url, *flags)
    assert (code, out) == (0, "Hi.\nBye.\n")
    first, second = wire.asked
    said = [f"{m['role']}: {m['content']}" for m in second.pop("messages")]
    assert said == ["system: Short.", "user: Hello", "assistant: Hi.", "user: Leave"]
    assert len(first.pop("messages")) == 2
    options = {"max_tokens": 9, "temperature": 0.5, "seed": 7, "model": "one"}
    assert first == second == options | {"stream": True, "stream_options": {"include_usage": True}}


def test_the_footer_on_stderr_is_that_of_generate(talk):
    with Wire(says("Hi.")) as wire:
        _, _, err = talk(["Hello"], "--url", wire.url)
    assert err == (
        "[4 tokens | TTFT 40 ms | 40.0 tokens/s | acceptance length 1.50 | ended by stop]\n"
    )


@pytest.mark.parametrize(
    ("numbers", "footer"),
    [
        ({}, "[ended by stop]"),
        ({"usage": {"completion_tokens": 4}, "metrics": None}, "[4 tokens | ended by stop]"),
        ({"metrics": {"speculative_decoding": None}}, "[drafter none | ended by stop]"),
        ({"metrics": {"speculative_decoding": NOT_DRAFTED}}, "[ended by stop]"),
    ],
)
def test_the_footer_leaves_out_what_a_server_does_not_report(talk, numbers, footer):
    with Wire(says("Hi.", numbers)) as wire:
        assert talk(["Hello"], "--url", wire.url)[2] == f"{footer}\n"


def test_draft_tokens_are_shown_where_that_is_asked_for(talk):
    tree = {"tokens": [5], "parents": [0], "sources": [1], "accepted": [1]}
    step = {"tokens": [5, 6], "ends": [2, 4], "sources": [1, 0], "tree": tree}
    told = {"sources": ["ngram"], "steps": [step]}
    choice = {"index": 0, "delta": {"content": "Hi.."}, "finish_reason": None, "speculation": told}
    answer = HEAD + event({"choices": [choice]}) + chunk(None, "stop") + DONE
    with Wire(answer, answer) as wire:
        code, out, err = talk(["Hello", "Next"], "--url", wire.url, "--show-drafts")
    assert (code, out) == (0, 2 * "[Hi]..\n")
    assert wire.asked[0]["return_speculation_details"] is True
    assert wire.asked[1]["messages"][1]["content"] == "Hi.."
    assert "speculation is off" in err  # as this server tells of none


def test_reset_forgets_all_but_the_system_text_and_exit_leaves(talk):
    with Wire(says("Hi."), says("Ho.")) as wire:
        lines = ["Hello", "/reset", "Again", "/exit", "never sent"]
        code, out, _ = talk(lines, "--url", f"{wire.url}/v1/", "--system", "Short.")
    assert (code, out) == (0, "Hi.\nHo.\n")
    assert [m["content"] for m in wire.asked[1]["messages"]] == ["Short.", "Again"]


def test_help_and_what_is_no_command_are_answered_here(talk):
    with Wire(says("Hi.")) as wire:
        lines = ["/help", "/leave", "/etc/passwd is a file?"]
        code, out, err = talk(lines, "--url", wire.url)
    assert code == 0 and out.startswith("/help prints this, /reset") and out.endswith("\nHi.\n")
    assert err.startswith("/leave is not a command. /help prints this")
    assert [m["content"] for m in wire.asked[0]["messages"]] == [lines[-1]]


def test_the_key_in_the_file_is_shown(talk, tmp_path):
    (tmp_path / "keys").write_text("first\nsecond\n")
    with Wire(says("Hi.")) as wire:
        talk(["Hello"], "--url", wire.url, "--api-key-file", str(tmp_path / "keys"))
    assert wire.keys == ["bearer first"] * 2


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (HEAD + chunk("On") + event({"error": {"message": "the\nend"}}) + DONE, "the end"),
        (HEAD + chunk("On"), CUT),
        (HEAD + chunk("On") + chunk(None, "stop"), CUT),
        (HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\nfff\r\n" + chunk("On"), CUT),
        (HEAD + chunk("On") + DONE, "without a finish reason"),
        (HEAD + chunk("On") + b"data: what\n\n", "is not OpenAI-compatible"),
        (HEAD + chunk("On") + ODD_STEP + DONE, "step details do not have"),
        (HEAD + chunk("On") + event({"error": {"message": "\x1b[2J"}}) + DONE, "error: �[2J"),
    ],
    ids=[
        "error",
        "cut",
        "cut after the finish",
        "cut in a chunk",
        "no finish",
        "no chunk",
        "odd step",
        "escapes",
    ],
)
def test_an_answer_that_does_not_end_well_is_one_line_and_stays_as_far_as_it_came(
    talk, answer, complaint
):
    with Wire(answer, says("Fine.")) as wire:
        code, out, err = talk(["Hello", "Next"], "--url", wire.url)
    assert (code, out) == (0, "On\nFine.\n")
    assert err.startswith("error: ") and err.count("\n") == 2
    assert complaint in err
    assert [m["content"] for m in wire.asked[1]["messages"]] == ["Hello", "On", "Next"]


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"", "cannot connect to"),
        (b'HTTP/1.1 503 Busy\r\n\r\n{"error": {"message": "not yet"}}', "not yet"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", "HTTP 502 Bad Gateway"),
    ],
)
def test_a_message_that_gets_no_word_is_taken_back_and_the_chat_goes_on(talk, answer, complaint):
    with Wire(answer, says("Fine.")) as wire:
        code, out, err = talk(["Hello", "Next"], "--url", wire.url)
    assert (code, out) == (0, "Fine.\n")
    assert err.startswith("error: ") and err.count("\n") == 2
    assert complaint in err
    assert [m["content"] for m in wire.asked[1]["messages"]] == ["Next"]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--url", "http://127.0.0.1:1"], "specserve serve"),
        (["--url", f"http://{'x' * 64}.example"], "correct --url"),
        (["--url", "127.0.0.1:8000"], "http://HOST:PORT"),
        (["--url", "http://me@there:80000"], "http://HOST:PORT"),
        (["--url", "http://there/?a=b"], "http://HOST:PORT"),
        (["--url", "http://there", "--api-key-file", "gone"], "Check the path"),
        (["--url", "http://there", "--api-key-file", os.devnull], "one per line"),
        (["--url", "http://there", "--drafter", "none"], "--drafter"),
        (["--url", "http://there", "--set", "memory.block_size=4"], "--set"),
        (["--model", "m", "--api-key-file", "f"], "--url"),
    ],
)
def test_a_mistake_at_the_start_is_one_line_that_says_what_to_do(talk, args, complaint):
    code, out, err = talk(["Hello"], *args)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert complaint in err


def test_a_model_that_the_server_does_not_have_is_refused_at_the_start(talk):
    with Wire() as wire:
        assert talk(["Hello"], "--url", wire.url, "--model", "other")[0] == 1
        assert talk([], "--url", wire.url, "--model", "one")[0] == 0


def test_events_are_read_as_the_standard_says():
    lines = b":\n: waiting\ndata: a\ndata:b\n\nid: 3\ndata: c: d\r\n\r\n\n\ndata: cut"
    assert list(events(io.BytesIO(lines))) == [b"a\nb", b"c: d"]


def test_ctrl_c_stops_the_answer_and_what_was_said_stays(capsys):
    script = Script(["On", "ce", KeyboardInterrupt()], [KeyboardInterrupt()], ["Yes."])
    chat = ChatSession(script)
    for message in ("Tell", "More", "Again?"):
        chat.ask(message)
    out, err = capsys.readouterr()
    assert (out, err.split("\n")[:2]) == ("Once\nYes.\n", ["[stopped]", "[stopped]"])
    assert script.heard[2] == ["Tell", "Once", "Again?"]


def test_ctrl_c_between_two_pieces_closes_the_answer(monkeypatch):
    class Stdout(io.StringIO):
        def write(self, text):
            if text == "On":
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", Stdout())
    script = Script(["On", "ce"])
    answer = script.stream_answer([])
    script.stream_answer = lambda messages: answer  # held here, so that nobody else closes it
    ChatSession(script).ask("Hello")
    assert inspect.getgeneratorstate(answer) == inspect.GEN_CLOSED


def test_an_answer_without_a_word_is_an_answer():
    script = Script([], ["Bob."])
    chat = ChatSession(script)
    chat.ask("I am Bob, say nothing")
    chat.ask("Who am I?")
    assert script.heard[1] == ["I am Bob, say nothing", "", "Who am I?"]


def test_a_conversation_that_grew_too_long_is_warned_about_reset(capsys):
    chat = ChatSession(
        Script([PromptTooLong(9, 8)], ["Hi."], [PromptTooLong(9, 8)], [RequestError("x")])
    )
    for message in "abcd":
        chat.ask(message)
    lines = capsys.readouterr().err.splitlines()
    assert ["/reset" in line for line in lines] == [False, False, True, False]


def test_a_server_answers_as_it_answers_everybody(server, talk):
    code, out, err = talk(["the cat", "def read"], "--url", server.url, *GREEDY)
    messages = [{"role": "user", "content": "the cat"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    text = server.post("/v1/chat/completions", body).body["choices"][0]["message"]["content"]
    assert code == 0
    assert out.startswith(f"{text}\n")
    assert err.count("[12 tokens | TTFT ") == err.count("| drafter none | ended by length]") == 2


def test_a_message_that_does_not_fit_costs_one_line(server, talk):
    code, out, err = talk(
        ["the cat " * 4096, "hi"], "--url", server.url, "--max-tokens=1", "--seed=0"
    )
    assert code == 0 and out
    refused, answered = err.splitlines()
    assert refused.startswith(
        "error: This model's maximum context length is "
    ) and answered.startswith("[1 tokens")


PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)


@contextlib.contextmanager
def chat_process(url, *args, **files):
    """Killed, if it still runs, when the block ends."""
    command = [sys.executable, "-m", "specserve", "chat", "--url", url, *args]
    with subprocess.Popen(command, text=True, **files) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_frees_the_blocks_of_an_answer_and_the_program_goes_on(server):
    with chat_process(server.url, "--temperature=0", **PIPES) as process:
        process.stdin.write("the cat\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "[stopped]\n"
        server.wait_until_idle()
        process.communicate("/exit\n", timeout=30)
    assert process.returncode == 0
    eventually(lambda: server.metric("vllm:request_success_total", finished_reason="abort") == 1)


def test_ctrl_c_while_nothing_is_said_ends_the_program_with_0():
    with Wire(says("Hi.")) as wire, chat_process(wire.url, **PIPES) as process:
        process.stdin.write("Hello\n")
        process.stdin.flush()
        assert process.stderr.readline().startswith("[4 tokens")
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


@pytest.fixture
def terminal():
    """Our end and the program's."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("end", ["Ctrl-C", "Ctrl-D"])
def test_at_a_terminal_ctrl_c_drops_a_line_and_leaves_an_empty_one(terminal, end):
    ours, theirs = terminal
    files = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with Wire(says("Hi.")) as wire, chat_process(wire.url, **files) as process:
        introduction = read_until(ours, b"> ")
        assert b"Chat with one. /help" in introduction and b"/reset" in introduction
        os.write(ours, b"dropped")
        read_until(ours, b"dropped")
        process.send_signal(signal.SIGINT)
        read_until(ours, b"> ")
        os.write(ours, b"Hello\r")
        read_until(ours, b"ended by stop]\r\n> ")
        os.write(ours, b"\x04") if end == "Ctrl-D" else process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert [m["content"] for m in wire.asked[0]["messages"]] == ["Hello"]


def read_until(terminal, text):
    seen = b""
    while not seen.endswith(text):
        assert select.select([terminal], [], [], 30)[0], f"{text} did not come after {seen}"
        seen += os.read(terminal, 4096)
    time.sleep(0.05)  # until it waits for keys again
    return seen


def test_with_a_server_nobody_pays_for_torch():
    code = "import sys; from specserve.cli import command; command.main(sys.argv[1:])"
    code += "; print(*sys.modules)"
    with Wire(says("Hi.")) as wire:
        command = [sys.executable, "-c", code, "chat", "--url", wire.url]
        done = subprocess.run(command, input="Hello\n", capture_output=True, text=True)
    answer, modules = done.stdout.splitlines()
    assert answer == "Hi."
    assert not {"torch", "numpy", "rich", "specserve.api.llm"} & set(modules.split())


def test_a_model_in_this_process_answers_through_its_template(llm, folder, talk):
    flags = ["--model", str(folder), "--system", "Short.", *GREEDY, *SETS]
    code, out, err = talk(["the cat", "def read"], *flags)
    messages = [{"role": "system", "content": "Short."}]
    for message in ("the cat", "def read"):
        messages.append({"role": "user", "content": message})
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12))
        messages.append({"role": "assistant", "content": output.text})
    assert (code, out) == (0, "".join(f"{m['content']}\n" for m in messages[2::2]))
    assert err.count("| drafter auto | ended by length]") == 2


def test_ctrl_c_in_a_step_gives_the_blocks_back_and_the_model_answers_again(
    llm, monkeypatch, capsys
):
    chat = ChatSession(
        LocalModel(llm, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    )
    with monkeypatch.context() as patched:
        step, calls = llm.engine.step, []
        patched.setattr(llm.engine, "step", lambda: interrupted(step, calls))
        chat.ask("the cat")
    assert llm.memory()["target"] == 0 and llm.engine.is_idle
    chat.ask("def read")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[stopped]" and lines[1].startswith("[200 tokens")
    assert len(chat.messages) == 4 and chat.messages[1]["content"]


def interrupted(step, calls):
    calls.append(step)
    if len(calls) == 12:
        signal.raise_signal(signal.SIGINT)
    return step()


def test_what_no_message_could_mend_is_said_at_the_start(llm, monkeypatch):
    with pytest.raises(RequestError, match="max_tokens"):
        LocalModel(llm, SamplingParams(max_tokens=0))
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="no chat template"):
        LocalModel(llm, SamplingParams())


class Parrot:
    """Repeats how many messages it got."""

    name, colored = "parrot", None

    def stream_answer(self, messages):
        yield f"{len(messages)}"
        return AnswerStatistics("stop")


def test_a_session_file_continues_a_conversation(tmp_path, capsys):
    file = tmp_path / "talk.json"
    ChatSession(Parrot(), "Be brief.", file).ask("one")
    again = ChatSession(Parrot(), None, file)
    again.ask("two \udcff")
    assert [m["content"] for m in again.messages] == ["Be brief.", "one", "2", "two \udcff", "4"]
    assert ChatSession(Parrot(), "Be brief.", file).messages == again.messages
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="--system has no effect"):
        ChatSession(Parrot(), "Be long.", file)
    again.reset()
    assert ChatSession(Parrot(), None, file).messages == []


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": "b"}', '[{"role": 3}]'])
def test_a_file_that_is_no_conversation_is_refused_and_kept(tmp_path, content):
    file = tmp_path / "notes.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="is not a conversation"):
        ChatSession(Parrot(), None, file)
    assert file.read_text() == content


def test_a_wrong_session_file_is_reported_before_the_model_is_loaded(
    talk, folder, tmp_path, monkeypatch
):
    file = tmp_path / "notes.json"
    file.write_text("{")
    monkeypatch.setattr("specserve.LLM", None)  # loading would raise a TypeError
    code, _, error = talk([], "--model", str(folder), "--session", str(file))
    assert code == 1 and "is not a conversation" in error


class Recorder:
    """Answers with what it was asked, and keeps its settings."""

    name, colored = "recorder", None

    def __init__(self):
        self.settings = {}

    def set(self, name, value):
        if name == "top_p" and value == 2:
            raise RequestError("top_p: at most 1", "top_p")
        self.settings[name] = value

    def choose(self, model):
        self.name = model

    def stream_answer(self, messages):
        yield json.dumps(messages)
        return AnswerStatistics("stop")


def test_commands_change_a_chat(tmp_path, capsys):
    chat = ChatSession(Recorder(), system="old")
    chat.ask("a")
    chat.run("/system", " be brief ")
    assert chat.messages[0] == {"role": "system", "content": "be brief"}
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    chat.run("/save", f" {tmp_path / 'kept.json'}")
    kept = [*chat.messages]
    chat.reset()
    assert chat.messages == kept[:1]
    chat.run("/load", f" {tmp_path / 'kept.json'}")
    assert chat.messages == kept
    for text, value in (("temperature 0.5", 0.5), ('stop ["a"]', ["a"]), ("stop end", "end")):
        chat.run("/set", f" {text}")
        assert chat.answerer.settings[text.split()[0]] == value
    capsys.readouterr()
    chat.run("/model", " other")
    chat.run("/model", "")
    assert capsys.readouterr().out == "other\nother\n"
    chat.run("/system", "")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    "command, rest, why",
    [
        ("/set", "", "write /set NAME VALUE"),
        ("/set", " colour 1", "write /set NAME VALUE"),
        ("/set", " top_p 2", "top_p: at most 1"),
        ("/load", " nowhere.json", "there is no conversation"),
        ("/save", " /nowhere/a.json", "cannot be written"),
    ],
)
def test_a_command_that_fails_says_why_and_changes_nothing(capsys, command, rest, why):
    chat = ChatSession(Recorder())
    chat.ask("a")
    before = [*chat.messages]
    capsys.readouterr()
    chat.run(command, rest)
    assert why in capsys.readouterr().err and chat.messages == before
    assert chat.answerer.settings == {}


def test_a_line_that_only_begins_like_a_command_is_a_message(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/systems\n/setting x\n/set top_k 3\n"))
    chat = ChatSession(Recorder())
    cli_chat.converse(chat)
    assert chat.answerer.settings == {"top_k": 3}
    assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["/setting x"]


def test_chats_are_sampled_less_wildly_if_the_model_names_nothing():
    neutral = GenerationDefaults(eos_token_ids=(3,))
    assert neutral.for_chats == {
        "temperature": 0.7,
        "top_p": 0.95,
        "min_p": 0.05,
        "max_tokens": 2048,
    }
    for own in ({"temperature": 0.6}, {"top_k": 20}, {"max_new_tokens": 9}):
        assert GenerationDefaults(**own).for_chats == {}
