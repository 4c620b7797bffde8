"""Chats with a model that has recurrent layers: which prompts find a state, and what counts it."""

from types import SimpleNamespace

import pytest

from specserve import LLM, SamplingParams
from specserve.api.async_llm import ReadyEngine
from tests.checkpoints import tiny_checkpoint
from tests.server.in_process import server_threads

RULES = {"role": "system", "content": "the cat sat on the mat " * 10}
FIRST = {"role": "user", "content": "why did the cat sit on the mat? " * 4}
SAID = {"role": "assistant", "content": "the mat was warm"}
EDITED = {"role": "user", "content": "where is the dog now? " * 5}
SETTINGS = {"memory.state_interval": 0, "model.threads": 1, "memory.kv_bytes": 1 << 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "lfm2", seed=1)


def history(llm, messages):
    """The full blocks of the tokens before the newest message."""
    [chat] = llm.chat(messages[:-1], SamplingParams(max_tokens=1), add_generation_prompt=False)
    return len(chat.prompt_token_ids) // 16 * 16


def test_an_edited_message_finds_the_state_before_it(folder):
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM(folder, set=SETTINGS, progress=False) as other:
        known = history(other, [RULES, FIRST])
    with LLM(folder, set=SETTINGS, progress=False) as llm:
        [first] = llm.chat([RULES, FIRST], params)
        [edited] = llm.chat([RULES, EDITED], params)
        [again] = llm.chat([RULES, EDITED], params)
        assert first.usage.cached_tokens == 0 and known > 40
        assert edited.usage.cached_tokens == known
        assert again.usage.cached_tokens == (edited.usage.prompt_tokens - 1) // 16 * 16
        assert again.token_ids == edited.token_ids


def test_an_engine_process_gets_the_place_of_the_newest_message(folder):
    with LLM(folder, set=SETTINGS, progress=False) as llm:
        processor, formats = llm.input_processor, llm.engine.tables.formats
    ready = ReadyEngine.__new__(ReadyEngine)
    ready.input_processor, ready.ready = processor, SimpleNamespace(kv_formats=formats)

    def read(processor, kept):
        text = processor.written([RULES, FIRST])
        return processor.encode(text, False, kept), text

    found = ready.read(read, SamplingParams(), "", [RULES, FIRST])
    rest = processor.tokenizer.decode(found.ids[found.num_history :], False)
    assert rest.find(FIRST["content"].strip()) in range(1, 12)


def test_turns_of_a_chat_find_states_and_metrics_count_them(folder):
    with server_threads(folder, **SETTINGS, **{"memory.host_bytes": 1 << 22}) as server:

        def cached(*messages):
            body = {"model": server.get("/v1/models").body["data"][0]["id"], "max_tokens": 6}
            answer = server.post("/v1/chat/completions", body | {"messages": messages})
            assert answer.status == 200, answer.body
            usage = answer.body["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

        none, size = cached(RULES, FIRST)
        assert none == 0
        edited, _ = cached(RULES, EDITED)
        # The response is not that of the model, as with templates that drop reasoning.
        next_turn, _ = cached(RULES, FIRST, SAID, EDITED)
        assert 40 < edited < next_turn
        assert next_turn >= (size - 8) // 16 * 16
        assert server.metric("specserve_state_checkpoint_hits_total") == 2
        assert server.metric("specserve_state_checkpoints") >= 4
