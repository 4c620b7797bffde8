"""Embeddings and scores: those of transformers by the model's files, next to streams."""

import base64
import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gguf import PoolingType
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from specserve.api.poolers import find_poolers
from specserve.api.pooling import INSTRUCTION, PAIR
from specserve.errors import ConfigError
from specserve.models.source import open_source
from specserve.server.embeddings import EMBEDDINGS
from specserve.server.ranking import RERANK, SCORE
from tests.checkpoints import tiny_checkpoint
from tests.models.gguf_files import write
from tests.server.asking import COMPLETIONS
from tests.server.in_process import server_threads

PATH, RERANKING, SCORING = "/v1/embeddings", "/v1/rerank", "/v1/score"
TEXTS = ["the cat sat", "def read_lines(path):", "a", "the other cat sat on the other mat"]
PROMPTS = {"query": "the cat: ", "document": ""}
TOKENS = ["a", "t"]  # of irrelevant and relevant documents
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
STREAM = {"prompt": "the cat sat on", "temperature": 0, "max_tokens": 100, "ignore_eos": True}


def with_pooling(folder, mode, normalizes=True):
    """The folder with the files of sentence-transformers."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    listed = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{name}" if i else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for entry in listed[1:]:
        (folder / entry["path"]).mkdir()
    config = {"word_embedding_dimension": 64, mode: True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    given = {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(given))
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A causal model with pooling: it embeds and generates."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("embedder"), seed=3)
    return with_pooling(folder, "pooling_mode_lasttoken")


@pytest.fixture(scope="module")
def server(embedder):
    with server_threads(embedder, **{"server.max_prompts": 3}) as server:
        yield server


@pytest.fixture(scope="module")
def averaging(tmp_path_factory):
    """A model without a head, whose embeddings are means of any length."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("mean"), "llama", seed=4, kind=AutoModel)
    with server_threads(with_pooling(folder, "pooling_mode_mean_tokens", False)) as server:
        yield folder, server


def hidden(folder, text):
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids).last_hidden_state[0].numpy()


def unit(vector):
    return vector / np.linalg.norm(vector)


def embedded(server, **asked):
    answer = server.post(PATH, asked)
    assert answer.status == 200, answer.body
    return answer.body


def vectors(answer):
    assert [each["index"] for each in answer["data"]] == [*range(len(answer["data"]))]
    return [each["embedding"] for each in answer["data"]]


def test_the_last_token_is_embedded_and_normalized(server, embedder):
    found = vectors(embedded(server, input=TEXTS))  # in two parts of at most three
    for text, vector in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(vector, unit(hidden(embedder, text)[-1]), **CLOSE)


def test_the_mean_is_embedded_as_long_as_it_is(averaging):
    folder, server = averaging
    [found] = vectors(embedded(server, input=TEXTS[3]))
    np.testing.assert_allclose(found, hidden(folder, TEXTS[3]).mean(0), **CLOSE)


def test_a_model_without_a_head_generates_nothing(averaging):
    _, server = averaging
    answer = server.post(COMPLETIONS, STREAM)
    assert answer.status == 400 and "without a head" in answer.body["error"]["message"]


def test_the_usage_counts_the_tokens_of_all_inputs(server, embedder):
    tokenizer = AutoTokenizer.from_pretrained(embedder)
    number = sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    answer = embedded(server, input=TEXTS)
    assert answer["usage"] == {"prompt_tokens": number, "total_tokens": number}
    assert (
        answer["object"] == "list"
        and answer["model"] == server.get("/v1/models").body["data"][0]["id"]
    )


@pytest.mark.parametrize("form", ["text", "ids", "list of ids"])
def test_inputs_have_every_form(server, embedder, form):
    ids = AutoTokenizer.from_pretrained(embedder)(TEXTS[0])["input_ids"]
    given = {"text": TEXTS[0], "ids": ids, "list of ids": [ids, ids]}[form]
    want = vectors(embedded(server, input=[TEXTS[0]]))[0]
    assert vectors(embedded(server, input=given)) == [want] * (2 if form == "list of ids" else 1)


def test_base64_has_the_same_numbers(server):
    [want] = vectors(embedded(server, input=TEXTS[0]))
    [text] = vectors(embedded(server, input=TEXTS[0], encoding_format="base64"))
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == want


def test_cut_embeddings_are_normalized_again(server):
    [whole] = vectors(embedded(server, input=TEXTS[0]))
    [cut] = vectors(embedded(server, input=TEXTS[0], dimensions=16))
    np.testing.assert_allclose(cut, unit(np.array(whole[:16])), **CLOSE)


def test_a_prompt_precedes_the_input(server):
    named = embedded(server, input="on the mat", prompt_name="query")
    assert vectors(named) == vectors(embedded(server, input="the cat: on the mat"))
    none = embedded(server, input="on the mat", prompt_name="document")
    assert vectors(none) == vectors(embedded(server, input="on the mat")) != vectors(named)


def test_a_long_input_is_refused_or_cut(server, embedder):
    long = "the cat sat on the mat, " * 300
    answer = server.post(PATH, {"input": long})
    assert answer.status == 400 and answer.body["error"]["param"] == "input"
    assert answer.body["error"]["code"] == "context_length_exceeded"
    ids = AutoTokenizer.from_pretrained(embedder)(long)["input_ids"][:511]
    assert vectors(embedded(server, input=long, truncate=True)) == vectors(
        embedded(server, input=ids)
    )


@pytest.mark.parametrize(
    "asked, param",
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": [10**9]}, "input"),
        ({"input": ""}, "input"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "prompt_name": "nobody"}, "prompt_name"),
        ({"input": "a", "inputs": "b"}, "inputs"),
        ({"input": ["a"] * 2049}, "input"),
    ],
)
def test_invalid_fields_are_named(server, asked, param):
    answer = server.post(PATH, asked)
    assert answer.status == 400 and answer.body["error"]["param"] == param, answer.body


def test_embeddings_and_streams_do_not_change_each_other(server):
    alone = server.post(COMPLETIONS, STREAM).body["choices"][0]["text"]
    want = vectors(embedded(server, input=TEXTS))
    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(server.stream, COMPLETIONS, STREAM) for _ in range(4)]
        found = [threads.submit(embedded, server, input=TEXTS) for _ in range(12)]
        assert all(vectors(each.result()) == want for each in found)
        for events in streams:
            chunks = events.result()[:-1]
            assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == alone
    assert server.metric("vllm:num_requests_running") == 0


def ranker_of(folder, labels=1, activation=None):
    fields = json.loads((folder / "config.json").read_text())
    if activation is not None:
        fields["sentence_transformers"] = {"activation_fn": activation}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    kind = AutoModelForSequenceClassification
    folder = tiny_checkpoint(tmp_path_factory.mktemp("scores"), kind=kind, num_labels=1)
    with server_threads(folder) as server:
        yield folder, server


def outputs(folder, query, document):
    """The classifier's only output."""
    ids = AutoTokenizer.from_pretrained(folder)(query, document, return_tensors="pt")["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids).logits.item()


def test_a_classifier_sorts_documents(classifier):
    folder, server = classifier
    asked = {"query": "a cat", "documents": [*TEXTS, {"text": "mats"}], "return_documents": True}
    answer = server.post(RERANKING, asked)
    assert answer.status == 200, answer.body
    want = [1 / (1 + math.exp(-outputs(folder, "a cat", text))) for text in [*TEXTS, "mats"]]
    results = answer.body["results"]
    assert [r["index"] for r in results] == sorted(range(5), key=lambda i: -want[i])
    for each in results:
        assert each["relevance_score"] == pytest.approx(want[each["index"]], abs=1e-5)
        assert each["document"]["text"] == [*TEXTS, "mats"][each["index"]]
    best = server.post(RERANKING, asked | {"top_n": 2, "return_documents": False}).body["results"]
    assert [r | {} for r in best] == [
        {k: v for k, v in r.items() if k != "document"} for r in results[:2]
    ]


@pytest.mark.parametrize("ones", ["a cat", ["a cat"] * 4])
def test_scores_have_the_order_of_the_texts(classifier, ones):
    folder, server = classifier
    answer = server.post(SCORING, {"text_1": ones, "text_2": TEXTS})
    want = [1 / (1 + math.exp(-outputs(folder, "a cat", text))) for text in TEXTS]
    assert [each["score"] for each in answer.body["data"]] == pytest.approx(want, abs=1e-5)


def test_a_ranker_without_activation_returns_its_output(tmp_path):
    kind = AutoModelForSequenceClassification
    folder = tiny_checkpoint(tmp_path / "m", kind=kind, num_labels=1)
    ranker_of(folder, activation="torch.nn.modules.linear.Identity")
    with server_threads(folder) as server:
        answer = server.post(SCORING, {"text_1": "a", "text_2": "cat"}).body
    assert answer["data"][0]["score"] == pytest.approx(outputs(folder, "a", "cat"), abs=1e-4)


PAIR_TEMPLATE = (
    "{% for m in messages %}{{ m.role if m.role in ['query', 'document'] }}"
    "{{ m.content }}{% endfor %}"
)


def with_log_odds(folder, has_template=True, squashes=True):
    """The folder with sentence-transformers' files of a model that answers with `a` or `t`."""
    if has_template:
        (folder / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    kinds = {"": "Transformer", "1_LogitScore": "LogitScore"}
    places = {"Transformer": "base", "LogitScore": "cross_encoder"}
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": path,
            "type": f"sentence_transformers.{places[name]}.modules.{name}",
        }
        for i, (path, name) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    no, yes = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(TOKENS)
    (folder / "1_LogitScore").mkdir()
    ids = {"true_token_id": yes, "false_token_id": no}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    activation = "activation.Sigmoid" if squashes else "linear.Identity"
    given = {"model_type": "CrossEncoder", "activation_fn": f"torch.nn.modules.{activation}"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(given))
    way = {"method": "forward", "method_output_name": "logits"}
    transformer = {
        "transformer_task": "text-generation",
        "modality_config": {"text": way, "message": way | {"format": "flat"}},
        "module_output_name": "causal_logits",
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer))
    return folder


@pytest.mark.parametrize("has_template", [False, True])
def test_two_tokens_rank_as_in_qwen3_reranker(tmp_path, has_template):
    folder = tiny_checkpoint(tmp_path / "m", seed=5)
    with_log_odds(folder, has_template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with server_threads(folder) as server:
        answer = server.post(SCORING, {"text_1": "a cat", "text_2": TEXTS[3]})
    text = "querya catdocument" + TEXTS[3]
    if not has_template:
        text = PAIR.format(instruction=INSTRUCTION, query="a cat", document=TEXTS[3])
    given = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(given).logits[0, -1]
    want = torch.softmax(logits[tokenizer.convert_tokens_to_ids(TOKENS)], 0)[1].item()
    assert answer.body["data"][0]["score"] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(
    "path, asked, param",
    [
        (RERANKING, {"documents": ["a"]}, "query"),
        (RERANKING, {"query": "a"}, "documents"),
        (RERANKING, {"query": "a", "documents": []}, "documents"),
        (RERANKING, {"query": "a", "documents": [1]}, "documents[0]"),
        (RERANKING, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        (RERANKING, {"query": "a", "documents": ["a"], "instruction": "b"}, "instruction"),
        (SCORING, {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        (SCORING, {"text_1": "a"}, "text_2"),
        (PATH, {"input": "a"}, "model"),
    ],
)
def test_a_ranker_names_invalid_fields(classifier, path, asked, param):
    answer = classifier[1].post(path, asked)
    assert answer.status == 400 and answer.body["error"]["param"] == param, answer.body


def test_a_model_without_files_has_no_embeddings(folder):
    with server_threads(folder) as server:
        for path, asked in (
            (PATH, {"input": "a"}),
            (RERANKING, {"query": "a", "documents": ["b"]}),
        ):
            answer = server.post(path, asked)
            assert answer.status == 400 and "--task" in answer.body["error"]["message"]


def test_the_operator_can_choose_embeddings_of_any_model(folder):
    with server_threads(folder, **{"model.task": "embed"}) as server:
        [found] = vectors(embedded(server, input=TEXTS[0]))
    np.testing.assert_allclose(found, unit(hidden(folder, TEXTS[0])[-1]), **CLOSE)


@pytest.mark.parametrize("kind", [EMBEDDINGS, RERANK, SCORE], ids=lambda kind: kind.name)
def test_large_bodies_are_read_in_a_process(kind):
    from specserve.server.body_process import KINDS

    assert KINDS[kind.name] is kind


def test_a_gguf_file_says_what_is_pooled(tmp_path):
    found = {}
    for kind in range(5):
        (folder := tmp_path / str(kind)).mkdir()
        file = write(folder, edit=lambda w, kind=kind: w.add_pooling_type(PoolingType(kind))).file
        tokenizer = open_source(file).tokenizer()
        found[kind] = find_poolers(file, "auto", tokenizer, "auto").embedder
        if kind in (2, 4):
            with pytest.raises(ConfigError, match=f"pooling_type = {kind}"):
                find_poolers(file, "embed", tokenizer, "auto")
    kinds = {kind: its and its.pooling.kind for kind, its in found.items()}
    assert kinds == {0: None, 1: "mean", 2: None, 3: "last", 4: None}
