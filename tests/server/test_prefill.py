"""Every route can continue the text of the assistant, or fill in text before a suffix."""

import pytest
from tokenizers import Tokenizer

from specserve.text.infill import FORMATS
from tests.checkpoints import tiny_checkpoint
from tests.server.asking import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.server.in_process import server_threads

BEGUN = [MESSAGES[1], {"role": "assistant", "content": "the other"}]
SAME = {"temperature": 0, "seed": 1}


def test_all_routes_continue_the_same_text(server):
    chat = {"messages": BEGUN, "continue_final_message": True, "max_tokens": 12} | SAME
    want = server.post(CHAT, chat).body["choices"][0]["message"]["content"]
    other = {"input": BEGUN, "continue_final_message": True, "max_output_tokens": 12} | SAME
    [item] = server.post(RESPONSES, other).body["output"]
    assert item["content"][0]["text"] == want
    options = {"num_predict": 12, "temperature": 0}
    ollama = {"messages": BEGUN, "options": options, "stream": False}
    assert server.post("/api/chat", ollama).body["message"]["content"] == want


@pytest.fixture(scope="module")
def infilling(tmp_path_factory):
    """A server whose model has the tokens to fill in text."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("infill"), seed=1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([*FORMATS[0][:3]])
    tokenizer.save(str(folder / "tokenizer.json"))
    with server_threads(folder) as server:
        yield server


def test_a_suffix_is_part_of_the_prompt(infilling):
    begin, hole, end = FORMATS[0][:3]
    text = {"prompt": f"{begin}the cat{hole} the mat{end}", "max_tokens": 12} | SAME
    want = infilling.post(COMPLETIONS, text).body
    asked = {"prompt": "the cat", "suffix": " the mat", "max_tokens": 12, "echo": True} | SAME
    found = infilling.post(COMPLETIONS, asked).body
    assert found["choices"][0]["text"] == "the cat" + want["choices"][0]["text"]
    assert found["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    options = {"num_predict": 12, "temperature": 0}
    ollama = {"prompt": "the cat", "suffix": " the mat", "options": options, "stream": False}
    answer = infilling.post("/api/generate", ollama).body["response"]
    assert answer == want["choices"][0]["text"]
    name = infilling.get("/v1/models").body["data"][0]["id"]
    assert "insert" in infilling.post("/api/show", {"model": name}).body["capabilities"]


@pytest.mark.parametrize(
    "asked, param",
    [({"prompt": [1, 2]}, "prompt"), ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens")],
)
def test_a_suffix_needs_a_whole_text(infilling, asked, param):
    answer = infilling.post(COMPLETIONS, {"prompt": "a", "suffix": "b"} | asked)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)


def test_a_model_without_the_tokens_refuses_a_suffix(server):
    answer = server.post(COMPLETIONS, {"prompt": "a", "suffix": "b"})
    assert (answer.status, answer.body["error"]["param"]) == (400, "suffix")


def test_a_bias_of_a_text_is_refused_with_a_hint(server):
    answer = server.post(COMPLETIONS, {"prompt": "a", "logit_bias": {" cat": 5}})
    assert answer.status == 400 and "POST /tokenize" in answer.body["error"]["message"]
