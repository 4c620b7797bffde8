"""lm-eval's scores, from a server with and without guesses, and from transformers."""

import random
from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specserve_bench.figures.lm_eval import LOGLIKELIHOOD, LmEval, write_task
from tests.checkpoints import TEXT, tiny_checkpoint
from tests.server.environments import python_with
from tests.server.server_process import ServerProcess

DRAFTERS = "auto", "none"
LIMIT, STOP = 24, "a"
GENERATE = {
    "output_type": "generate_until",
    "generation_kwargs": {"until": [STOP], "max_gen_toks": LIMIT, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match"}],
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def documents():
    """Texts of many lengths, each with what is scored behind it."""
    source = random.Random(0)
    words = TEXT.split()
    lengths = [source.randrange(1, 90) for _ in range(30)]
    return [
        {
            "context": " ".join(source.choices(words, k=length)),
            "target": f" {' '.join(source.choices(words, k=1 + length % 4))}",
        }
        for length in lengths
    ]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, "scored", documents(), **LOGLIKELIHOOD)
    write_task(folder, "written", documents(), **GENERATE)
    return folder


@pytest.fixture(scope="module")
def servers(folder, tmp_path_factory):
    python_with("lm_eval")  # skips before servers start
    draft = tiny_checkpoint(tmp_path_factory.mktemp("draft"), seed=2)
    own = {"auto": [f"--draft-model={draft}"]}  # `none` refuses one
    with ExitStack() as stack:
        starting = {
            d: ServerProcess(folder, "--served-model-name=tiny", f"--drafter={d}", *own.get(d, ()))
            for d in DRAFTERS
        }
        yield {d: stack.enter_context(server) for d, server in starting.items()}


@pytest.fixture(scope="module")
def lm_evals(servers, folder, tasks):
    """lm-eval, beside a server of each drafter."""
    with ExitStack() as stack:
        told = {}
        for drafter, server in servers.items():
            args = {
                "model": "tiny",
                "base_url": f"{server.url}/v1/completions",
                "tokenizer": str(folder),
                "tokenizer_backend": "huggingface",
                "max_length": 512,
            }
            started = LmEval(python_with("lm_eval"), "local-completions", args, tasks)
            told[drafter] = stack.enter_context(started)
        yield told


def of_transformers(folder, doc):
    """The loglikelihood in float32, and whether each token is the likeliest."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    known = len(tokenizer(doc["context"]).input_ids)
    ids = torch.tensor(tokenizer(doc["context"] + doc["target"]).input_ids)
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, known - 1 : -1].log_softmax(-1)
    told = logprobs.gather(1, ids[known:, None]).sum().item()
    return told, logprobs.argmax(-1).equal(ids[known:])


@pytest.mark.parametrize("task", ["scored", "written"])
@pytest.mark.parametrize("setting", [{}, {"_concurrent": 8}, {"_batch_size": 4}], ids=str)
def test_a_drafter_changes_no_score_and_no_loglikelihood(lm_evals, task, setting):
    plain = lm_evals["none"].run(task, _concurrent=1, _batch_size=1)
    found = lm_evals["auto"].run(task, **{"_concurrent": 1, "_batch_size": 1} | setting)
    assert len(found.answers) == 30
    assert (found.answers, found.scores) == (plain.answers, plain.scores)


def test_loglikelihoods_are_those_of_transformers(lm_evals, folder):
    found = lm_evals["auto"].run("scored", _concurrent=1, _batch_size=1)
    for number, doc in enumerate(documents()):
        [(told, is_greedy)] = found.answers[number]
        want, is_likeliest = of_transformers(folder, doc)
        assert told == pytest.approx(want, rel=0, abs=1e-4)
        assert is_greedy == is_likeliest


def test_generated_text_is_that_of_a_plain_request(lm_evals, servers):
    found = lm_evals["auto"].run("written", _concurrent=1, _batch_size=1)
    asked = {"temperature": 0, "max_tokens": LIMIT, "stop": STOP}
    for number, doc in enumerate(documents()):
        answer = servers["none"].post("/v1/completions", asked | {"prompt": doc["context"]})
        [choice] = answer.body["choices"]
        assert found.answers[number] == [choice["text"]]
    assert servers["auto"].metric("vllm:spec_decode_num_accepted_tokens_total") > 0
