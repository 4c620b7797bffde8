"""A drafter never changes the text of SmolLM2 and Gemma, at T = 0 and above."""

import pytest

from specserve import LLM, SamplingParams, StructuredOutputsParams
from specserve.models.parse_config import load_config
from specserve_bench.figures.real import QUESTIONS
from specserve_drafters.base import AUTO_SOURCES
from tests.engine.engines import let_all_guess
from tests.models.eagle_heads import LLAMA, write_head
from tests.real.conftest import SETTINGS

SCHEMA = {
    "type": "object",
    "properties": {
        "language": {"type": "string", "maxLength": 20},
        "year_of_its_first_release": {"type": "integer"},
        "is_compiled": {"type": "boolean"},
    },
    "required": ["language", "year_of_its_first_release", "is_compiled"],
    "additionalProperties": False,
}
HOT = 0.8


@pytest.fixture(scope="module", params=["float", "int8"])
def load(load, request):
    """An LLM of SmolLM2 with these activations."""

    def load_with(drafter="none", settings=None, **arguments):
        given = {"model.activations": request.param} | (settings or {})
        return load(drafter, given, **arguments)

    return load_with


@pytest.fixture(scope="module")
def plain(load):
    """SmolLM2 without draft tokens."""
    return load()


@pytest.fixture(scope="module")
def head(models, tmp_path_factory):
    """A random EAGLE-3 head of SmolLM2."""
    config = load_config(models.smollm2_folder)
    folder = tmp_path_factory.mktemp("heads") / "head"
    sizes = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": 8192,
        "draft_vocab_size": 2000,
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
    }
    write_head(folder, fields=LLAMA, **sizes)
    return folder


@pytest.fixture(scope="module")
def every(load, models, head):
    """SmolLM2 with all sources; it is its own draft model."""
    options = {"sources": [*AUTO_SOURCES], "max_depth": 6}
    settings = {"drafter.options": options, "drafter.head": str(head)}
    return load("auto", settings, draft_model=models.smollm2)


@pytest.fixture(scope="module")
def requests(problems):
    """Prompts and parameters by what they ask for."""
    form = StructuredOutputsParams(json=SCHEMA)
    program = problems[4]["prompt"]
    # A prediction that is right at first, and then is not.
    expected = program[-120:] + problems[4]["canonical_solution"]
    return {
        "program": (program, {"prediction": expected}),
        "repetition": ("ha ha ho " * 12, {"repetition_penalty": 1.1}),
        "chat": (chat(QUESTIONS[2]), {"presence_penalty": 0.5, "top_p": 0.9}),
        "form": (chat("Describe the language Rust as JSON."), {"structured_outputs": form}),
    }


def chat(question):
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def wanted(plain, requests):
    """The outputs without draft tokens, by temperature; each is computed once."""
    known = {}

    def wanted(temperature, size):
        key = temperature, size
        if key not in known:
            known[key] = outputs(plain, requests, temperature, size)
        return known[key]

    return wanted


def outputs(llm, requests, temperature, size, **others):
    """All requests at once, twice: sources learn from the first outputs."""
    prompts = [prompt for prompt, _ in requests.values()]
    params = [
        SamplingParams(temperature=temperature, seed=7, max_tokens=size, **asked, **others)
        for _, asked in requests.values()
    ]
    return [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]


def said(outputs):
    return [[(o.token_ids, o.text, o.finish_reason) for o in each] for each in outputs]


SLOW = pytest.mark.slow
CASES = [("all", 24), *(pytest.param(name, 96, marks=SLOW) for name in (*AUTO_SOURCES, "all"))]


@pytest.mark.parametrize("temperature", [0, HOT])
@pytest.mark.parametrize(("source", "size"), CASES)
def test_no_source_of_auto_changes_the_text(
    every, requests, wanted, monkeypatch, source, temperature, size
):
    let_all_guess(monkeypatch)
    chosen = [*AUTO_SOURCES] if source == "all" else [source]
    got = outputs(
        every, requests, temperature, size, speculation={"sources": chosen, "max_nodes": 12}
    )
    assert said(got) == said(wanted(temperature, size))
    counts = [o.speculation.sources.get(name) for each in got for o in each for name in chosen]
    assert sum(count.verified for count in counts if count) > 0, "no draft token was verified"


@SLOW
@pytest.mark.parametrize("temperature", [0, HOT])
@pytest.mark.parametrize("drafter", ["ngram", "model", "eagle"])
def test_no_drafter_alone_changes_the_text(
    load, models, head, requests, wanted, drafter, temperature
):
    draft = {"model": models.smollm2, "eagle": head}.get(drafter)
    llm = load(drafter, {"speculation.max_nodes": 8}, draft_model=draft)
    got = outputs(llm, requests, temperature, 96)
    assert said(got) == said(wanted(temperature, 96))
    assert sum(o.speculation.drafted for each in got for o in each) > 0
    llm.close()


@pytest.mark.parametrize("temperature", [HOT, pytest.param(0, marks=SLOW)])
def test_auto_with_its_usual_sources_does_not_change_the_text(load, requests, wanted, temperature):
    llm = load("auto")
    assert said(outputs(llm, requests, temperature, 24)) == said(wanted(temperature, 24))
    llm.close()


@pytest.mark.parametrize("temperature", [HOT, pytest.param(0, marks=SLOW)])
def test_drafting_does_not_change_the_text_of_gemma(models, gemma, problems, temperature):
    prompts = [problems[4]["prompt"], "ha ha ho " * 12]
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=24)
    settings = SETTINGS | {"speculation.max_nodes": 8}
    given = {"drafter": "ngram", "set": settings, "weights": gemma.weights}
    with LLM(models.gemma, progress=False, **given) as llm:
        got = llm.generate(prompts, params)
        assert llm.engine.stats.num_drafted > 0
    assert said([got]) == said([gemma.generate(prompts, params)])
