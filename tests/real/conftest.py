"""Real weights and prompts, and transformers' modules of the same weights."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from transformers import AutoConfig, AutoModelForCausalLM

from specserve import LLM
from specserve.models.gguf.source import GgufFile
from specserve_bench.real_models import FOLDER, REMEDY, real_models

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
SETTINGS = {"memory.kv_bytes": 1 << 28, "scheduler.max_model_len": 2048}
SETTINGS |= {"model.activations": "float"}  # more exact than the default of GGUF files
INT8 = {"model.activations": "int8"}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.real)


@pytest.fixture(autouse=True)
def one_thread():
    """Real models use all cores."""


@pytest.fixture(scope="session")
def models():
    found = real_models(ROOT / FOLDER)
    if found is None:
        pytest.skip(f"needs real weights in {FOLDER}: {REMEDY}. NOT checked here")
    return found


@pytest.fixture(scope="session")
def problems(models):
    """HumanEval's, in order."""
    with gzip.open(models.human_eval, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def load(models):
    """An LLM of SmolLM2; its weights are loaded once for all."""
    opened = []

    def load(drafter="none", settings=None, **arguments):
        weights = [model for llm in opened for model in llm.weights]
        given = SETTINGS | (settings or {})
        llm = LLM(
            models.smollm2, drafter=drafter, set=given, weights=weights, progress=False, **arguments
        )
        opened.append(llm)
        return llm

    yield load
    for llm in opened:
        llm.close()


@pytest.fixture(scope="session")
def plain(load):
    """SmolLM2 without draft tokens."""
    return load()


@pytest.fixture(scope="session")
def plain_int8(load):
    """SmolLM2 without draft tokens, with activations in 8 bits."""
    return load(settings=INT8)


@pytest.fixture(scope="session")
def exact(load):
    """SmolLM2 without draft tokens, computed in fp32."""
    return load(dtype="float32")


@pytest.fixture(scope="session")
def gemma(models):
    """Gemma without draft tokens."""
    with LLM(models.gemma, drafter="none", set=SETTINGS, progress=False) as llm:
        yield llm


@pytest.fixture(scope="session")
def gemma_int8(models):
    """Gemma without draft tokens, with activations in 8 bits."""
    with LLM(models.gemma, drafter="none", set=SETTINGS | INT8, progress=False) as llm:
        yield llm


@pytest.fixture(scope="session")
def smollm2_of_transformers(models):
    return of_transformers(models.smollm2_folder)


@pytest.fixture(scope="session")
def gemma_of_transformers(models):
    """With the file's values in fp32: its folder has rounded ones, and transformers takes half a
    minute to read the file.
    """
    config = AutoConfig.from_pretrained(models.gemma_folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    file, parameters = GgufFile(models.gemma), dict(model.named_parameters())
    for name, place in file.places().items():
        values = values_of(file.header.tensors[place.name])
        # Norms of a file include the 1 that Gemma's modules add.
        parameters[name].data = values - 1 if name.endswith("norm.weight") else values
    return model


def values_of(entry):
    octets = np.fromfile(entry.file, np.uint8, entry.size, offset=entry.offset)
    rows = octets.reshape(*entry.shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[entry.type.name]))


def of_transformers(folder):
    """Transformers' modules in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
