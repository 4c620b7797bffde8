"""A coding agent over /v1/messages and over chats reads a file, edits it and runs a command."""

import json
import subprocess
import sys

import pytest
from anthropic import Anthropic, beta_tool
from openai import OpenAI

from tests.checkpoints import tiny_tokenizer
from tests.server.calling import TEMPLATE
from tests.server.scripted import ScriptedEngine, scripted, with_template

BROKEN, RIGHT = "print(1 +* 2)", "print(1 + 2)"
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
READ = CALL % ("read_file", '{"path": "sum.py"}')
EDIT = CALL % ("edit_file", '{"path": "sum.py", "old": "+*", "new": "+"}')
RUN = CALL % ("run", '{"path": "sum.py"}')
TURNS = [  # what the last result contains, and the response
    ("result: 3", "<think>\nIt works.\n</think>\n\nFixed: it prints 3."),
    ("edited", f"Now I run it.\n{RUN}"),
    (BROKEN, f"<think>\nA typo.\n</think>\n\n{EDIT}"),
    ("", f"Let me read it.\n{READ}"),
]
TASK = {"role": "user", "content": "Fix sum.py"}


class Coder(ScriptedEngine):
    """Says what `TURNS` has for a prompt."""

    def add(self, token_ids, *args, **kw):
        tokenizer = tiny_tokenizer()
        prompt = tokenizer.decode(token_ids)
        reply = next(text for part, text in TURNS if part in prompt)
        ids = [*tokenizer.encode(reply), tokenizer.eos_token_id]
        self.script = ids, range(0, len(ids), 3)
        return super().add(token_ids, *args, **kw)


@pytest.fixture(scope="module")
def coder():
    tokenizer = with_template(tiny_tokenizer().backend_tokenizer, TEMPLATE)
    with scripted(tokenizer, engine=Coder, **{"server.served_model_name": "tiny"}) as server:
        yield server


def functions_in(folder):
    """The functions of the agent, as it calls them."""

    def read_file(path: str) -> str:
        """Read a file."""
        return (folder / path).read_text()

    def edit_file(path: str, old: str, new: str) -> str:
        """Replace a text in a file."""
        (folder / path).write_text((folder / path).read_text().replace(old, new))
        return "edited"

    def run(path: str) -> str:
        """Run a program."""
        command = [sys.executable, "-I", str(folder / path)]
        return f"result: {subprocess.run(command, capture_output=True, text=True).stdout}"

    return read_file, edit_file, run


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sum.py").write_text(BROKEN)
    return tmp_path


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_anthropics_kit_repairs_a_program(coder, folder, stream):
    with Anthropic(
        base_url=f"http://127.0.0.1:{coder.port}", api_key="none", max_retries=0
    ) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny",
            max_tokens=1000,
            messages=[TASK],
            tools=[beta_tool(function) for function in functions_in(folder)],
            stream=stream,
        )
        messages = [turn.get_final_message() for turn in runner] if stream else [*runner]
    assert [m.stop_reason for m in messages] == ["tool_use"] * 3 + ["end_turn"]
    assert messages[-1].content[-1].text == "Fixed: it prints 3."
    assert messages[1].content[0].thinking == "A typo."
    assert (folder / "sum.py").read_text() == RIGHT


def test_an_agent_over_chats_repairs_a_program(coder, folder):
    functions = {f.__name__: f for f in functions_in(folder)}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in functions
    ]
    messages = [TASK]
    with OpenAI(
        base_url=f"http://127.0.0.1:{coder.port}/v1", api_key="none", max_retries=0
    ) as client:
        for _ in range(5):
            with client.chat.completions.stream(
                model="tiny", messages=messages, tools=tools
            ) as stream:
                for _ in stream:
                    pass
                said = stream.get_final_completion().choices[0]
            messages.append(said.message.model_dump(exclude_none=True))
            if said.finish_reason == "stop":
                break
            for call in said.message.tool_calls:
                result = functions[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert said.message.content == "Fixed: it prints 3."
    assert (folder / "sum.py").read_text() == RIGHT
