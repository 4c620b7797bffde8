"""Any body of the routes next to OpenAI's gets an answer of its API, and disturbs no stream."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import tiny_checkpoint
from tests.server.asking import COMPLETIONS, saying, streaming
from tests.server.in_process import server_threads
from tests.server.test_embeddings import with_log_odds

OPENAI = "/v1/embeddings", "/v1/rerank", "/v1/score"
OLLAMA = "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"
ANTHROPIC = "/v1/messages", "/v1/messages/count_tokens"
ERRORS = {OPENAI: ({"error"}, dict), OLLAMA: ({"error"}, str), ANTHROPIC: ({"type", "error"}, dict)}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = {
    OPENAI: ["input", "query", "documents", "text_1", "text_2", "dimensions", "top_n", "truncate"],
    OLLAMA: [
        *("messages", "prompt", "options", "format", "think", "tools", "input", "raw"),
        *("logprobs", "top_logprobs", "system"),
    ],
    ANTHROPIC: [
        *("messages", "system", "tools", "tool_choice", "thinking", "stop_sequences"),
        *("output_config", "temperature", "metadata", "top_k"),
    ],
}
FEW = {"options": {"num_predict": 2}}  # tokens of a response
USER = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(scope="module", params=["embed", "rank"])
def pooling(request, tmp_path_factory):
    folder = with_log_odds(tiny_checkpoint(tmp_path_factory.mktemp("both"), seed=1))
    if request.param == "embed":
        (folder / "modules.json").unlink()
    with server_threads(folder, **{"model.task": request.param}) as server:
        yield server


@pytest.mark.parametrize("routes", NAMES, ids=["openai", "ollama", "anthropic"])
def test_any_body_gets_an_answer_of_the_api(pooling, routes):
    bodies = st.dictionaries(
        st.sampled_from([*NAMES[routes], "model", "suffix", "x"]), VALUES, max_size=4
    )
    stream = saying(400, temperature=0, stream=True)
    alone = pooling.post(COMPLETIONS, stream | {"stream": False}).body["choices"][0]["text"]

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(routes), bodies)
    def check(path, body):
        if path in ("/api/chat", "/api/generate"):
            body = FEW | body | {"stream": False}
        if routes is ANTHROPIC:
            body = USER | body
        answer = pooling.post(path, body)
        assert answer.status == 200 or 400 <= answer.status < 500, answer.body
        if answer.status != 200:
            keys, kind = ERRORS[routes]
            assert answer.body.keys() == keys and isinstance(answer.body["error"], kind)

    with streaming(pooling, stream) as events:
        check()
        rest = [*events]
    assert rest[-1] == "[DONE]"
    assert alone.endswith("".join(c["choices"][0]["text"] for c in rest[:-1] if c["choices"]))
