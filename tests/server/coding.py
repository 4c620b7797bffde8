"""A server whose model writes the calls of a coding agent: a grammar forces each response."""

import contextlib
import json

import pytest

from specserve.exchange import client
from specserve.exchange.sampling_params import ruled
from specserve.text.grammars.structured_outputs import StructuredOutputsParams, grammar_of
from tests.checkpoints import EOS, tiny_checkpoint, tiny_tokenizer
from tests.server.in_process import server_threads

BROKEN, RIGHT = 'print("the sum is", 17 +* 25)\n', 'print("the sum is", 17 + 25)\n'
OUTPUT = "the sum is 42"
LAST = "Fixed: it prints 42."
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TEMPLATE = (  # Hermes' calls and reasoning; shows all that a client sends back
    "{% if tools %}tools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call>\nname and arguments\n</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}\n</tool_call>{% endfor %}"
    f"{EOS}\n{{% endfor %}}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MAX_LEN = 1 << 18  # tokens, which are about as many bytes: agents have long prompts


def reply(calls, prompt):
    """The next response of a repair. `calls` has the name and arguments of read, edit and run."""
    if "<tool_call>" not in prompt:
        return "A title"  # agents also send requests without tools
    if OUTPUT in prompt:
        return f"<think>\nIt works.\n</think>\n\n{LAST}"
    if "17 + 25" in prompt:
        return f"Now I run it.\n{written(*calls['run'])}"
    if "17 +* 25" in prompt:
        return f"<think>\nA typo.\n</think>\n\n{written(*calls['edit'])}"
    return f"Let me read it.\n{written(*calls['read'])}"


def written(name, arguments):
    return CALL % (name, json.dumps(arguments))


@contextlib.contextmanager
def coding_server(folder, calls, **settings):
    """A server of a random model, and the prompts that it gets. It drafts, as servers do."""
    tiny_checkpoint(folder, max_position_embeddings=MAX_LEN)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer, prompts = tiny_tokenizer(), list[str]()
    add = client.EngineClient.add

    def add_forced(engine, token_ids, samplings, *args, **kw):
        """Add a request to the engine, with a grammar that has one text."""
        prompts.append(tokenizer.decode(token_ids))
        grammar = grammar_of(StructuredOutputsParams(choice=[reply(calls, prompts[-1])]))
        samplings = [ruled(each, grammar, [tokenizer.eos_token_id]) for each in samplings]
        return add(engine, token_ids, samplings, *args, **kw)

    settings = {"server.served_model_name": "tiny", "memory.kv_bytes": 1 << 28} | settings
    settings |= {"scheduler.max_model_len": MAX_LEN}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.EngineClient, "add", add_forced)
        with server_threads(folder, **settings) as server:
            yield server, prompts
