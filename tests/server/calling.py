"""Servers for clients that call functions: one of a random model, and one that says a script."""

from tests.checkpoints import CHAT_TEMPLATE, EOS, tiny_tokenizer
from tests.server.scripted import ScriptedEngine, scripted, with_template

TEMPLATE = (  # in which Hermes' calls and reasoning are found
    "{% if tools %}tools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call>\nname and arguments\n</tool_call>"
    f"{EOS}\n{{% endif %}}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments.city }}</tool_call>{% endfor %}"
    f"{EOS}\n{{% endfor %}}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RESULT = "22 degrees"  # what the function says to which clients send its result
CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Rome", "days": %d}}\n</tool_call>'
REPLIES = [  # what a prompt contains, all of it, and the answer; the first that fits is given
    ((f"tool: {RESULT}", "weather Rome", "as JSON"), '{"city": "Rome", "days": 9}'),
    ((f"tool: {RESULT}", "weather Rome", "final_result"), CALL % ("final_result", 9)),
    ((f"tool: {RESULT}", "weather Rome"), f"<think>\nIt is warm.\n</think>\n\nIt is {RESULT}."),
    ((f"<tool_response>\n{RESULT}", '"city": "Rome"'), f"It is {RESULT}."),
    (("You can call these functions:",), f"Let me see.\n{CALL % ('weather', 2)}"),
    (("tools:",), f"<think>\nI have to look.\n</think>\n\nLet me see.\n{CALL % ('weather', 2)}"),
]


class Replying(ScriptedEngine):
    """Says what `REPLIES` has for a prompt."""

    def add(self, token_ids, *args, **kw):
        tokenizer = tiny_tokenizer()
        prompt = tokenizer.decode(token_ids)
        reply = next(text for parts, text in REPLIES if all(part in prompt for part in parts))
        ids = [*tokenizer.encode(reply), tokenizer.eos_token_id]
        self.script = ids, range(0, len(ids), 3)
        return super().add(token_ids, *args, **kw)


def replying(template=TEMPLATE):
    """A server whose engine is `Replying`."""
    tokenizer = with_template(tiny_tokenizer().backend_tokenizer, template)
    return scripted(tokenizer, engine=Replying, **{"server.served_model_name": "tiny"})


def describing():
    """The same of a model whose template shows no tools, so that the server describes them."""
    return replying(CHAT_TEMPLATE)
