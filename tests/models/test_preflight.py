"""Mistakes that are reported before any model is loaded, and modules that do not import torch."""

import json
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from specserve.config import load_config
from specserve.models.eagle_config import AUX_LAYER_IDS
from specserve.models.selection import resolve_drafters
from tests.checkpoints import tiny_checkpoint
from tests.models.eagle_heads import write_head
from tests.models.gguf_files import write
from tests.models.refusals import COMMANDS_IN_FORKS, HEAVY, refusals

EXCHANGE = Path(__file__).parents[2] / "specserve" / "exchange"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with `whole`, a model, and with copies of it that each have a mistake."""
    folder = tmp_path_factory.mktemp("models")
    tiny_checkpoint(folder / "whole")
    tiny_checkpoint(folder / "other_ids", vocab_size=321)
    tiny_checkpoint(folder / "deep", num_hidden_layers=4)
    write_head(folder / "head")
    write_head(folder / "no_layers")
    rewrite(**{AUX_LAYER_IDS: None})(folder / "no_layers")
    write_head(folder / "wide_head", target_hidden_size=96)
    write_head(folder / "empty_head")
    (folder / "empty_head" / "model.safetensors").unlink()
    for name in "empty", "out":
        (folder / name).mkdir()
    write_head(folder / "out" / "deep-head")
    write(folder / "q8")
    for name, spoil in SPOILT.items():
        shutil.copytree(folder / "whole", folder / name)
        spoil(folder / name)
    return folder


def rewrite(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def remove(name):
    return lambda folder: (folder / name).unlink()


SPOILT = {
    "no_config": remove("config.json"),
    "broken_config": lambda folder: (folder / "config.json").write_text("{"),
    "other_family": rewrite(architectures=["GemmaForCausalLM"]),
    "own_code": rewrite(architectures=["NewForCausalLM"], auto_map={"AutoConfig": "new.New"}),
    "mamba": rewrite(architectures=["MambaForCausalLM"], model_type="mamba"),
    "quantized": rewrite(quantization_config={"bits": 4}),
    "gptq": rewrite(quantization_config={"quant_method": "gptq", "bits": 4}),
    "no_weights": remove("model.safetensors"),
    "pickles": lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"),
    "no_tokenizer": remove("tokenizer.json"),
}
DEEP = ["--model=./deep"]
MISTAKES = {  # arguments after the command -> words of the complaint
    "no folder": (["--model=./nowhere"], "no such folder"),
    "a file": (["--model=whole/config.json"], "or the folder with config.json"),
    "no config.json": (["--model=./no_config"], "config.json is missing"),
    "no chat template": (
        ["--model=./whole", "--chat-template=nowhere.jinja"],
        "nowhere.jinja: the chat template cannot be read",
    ),
    "a broken config.json": (["--model=./broken_config"], "is not valid JSON"),
    "another architecture": (["--model=./other_family"], "'GemmaForCausalLM'"),
    "code of its own": (["--model=./own_code"], "code from a checkpoint (auto_map) is never run"),
    "a state beside KV": (["--model=./mamba"], "layers with a recurrent state"),
    "a GGUF file for transformers": (
        ["--model=./q8/model.gguf", "--set=model.implementation=transformers"],
        "needs a folder in the Hugging Face layout",
    ),
    "quantized": (["--model=./quantized"], "quant_method = None is not supported"),
    "quantized already": (
        ["--model=./gptq", "--quantize=w4"],
        "model.quantize = 'w4' (--quantize): gptq is quantized already (gptq, 4 bits in groups of "
        "128). Remove the setting",
    ),
    "a GGUF file that is quantized already": (
        ["--model=./q8/model.gguf", "--quantize=w4"],
        "model.quantize = 'w4' (--quantize): q8/model.gguf is quantized already (gguf). Remove",
    ),
    "a draft model that is quantized already": (
        ["--model=./whole", "--draft-model=./gptq", "--draft-quantize=w8"],
        "drafter.quantize = 'w8' (--draft-quantize): gptq is quantized already",
    ),
    "other bits": (["--model=./whole", "--quantize=w3"], "--quantize: model.quantize = 'w3'"),
    "no weights": (["--model=./no_weights"], "no weights. Add"),
    "pickles": (["--model=./pickles"], "Convert them to safetensors"),
    "no tokenizer": (["--model=./no_tokenizer"], "no tokenizer"),
    "an unknown drafter": (["--model=./whole", "--drafter=ngarm"], "Unknown drafter 'ngarm'"),
    "no such package": (["--model=./whole", "--drafter=nosuch.module:Class"], "nosuch"),
    "a drafter without a name": (
        ["--model=./whole", "--drafter=:Class"],
        "Unknown drafter ':Class'",
    ),
    "an unknown option": (["--model=./whole", "--set=drafter.options.max_gram=3"], "max_gram"),
    "a wrong option": (["--model=./whole", "--set=drafter.options.max_ngram=0"], "max_ngram"),
    "a wrong option of the model's drafter": (
        ["--model=./whole", "--draft-model=./whole", "--set=drafter.options.width=99"],
        "width",
    ),
    "no draft model": (["--model=./whole", "--draft-model=./nowhere"], "no such folder"),
    "no draft model where none guesses": (
        ["--model=./whole", "--draft-model=./nowhere", "--set=speculation.max_nodes=0"],
        "no such folder",
    ),
    "a draft model without weights": (
        ["--model=./whole", "--draft-model=./no_weights"],
        "no weights",
    ),
    "no head's folder": ([*DEEP, "--draft-head=./nowhere"], "./nowhere: no such folder"),
    "no head": (
        [*DEEP, "--draft-head=./whole"],
        "whole/config.json: architectures = ['Qwen3ForCausalLM'] is not an EAGLE-3 head",
    ),
    "a folder with a head in it": (
        [*DEEP, "--draft-head=./out"],
        "out is not a head, because config.json is missing. Name the head in it: out/deep-head",
    ),
    "a folder with a head in it for a draft model": (
        [*DEEP, "--draft-model=./out"],
        "out is not a draft model. Name the head in it: out/deep-head",
    ),
    "a folder with nothing in it for a head": (
        [*DEEP, "--draft-head=./empty"],
        "empty is not a head, because config.json is missing. Check the path",
    ),
    "a head without auxiliary layers": (
        [*DEEP, "--draft-head=./no_layers"],
        f"no_layers/config.json: {AUX_LAYER_IDS} is",
    ),
    "a head without weights": ([*DEEP, "--draft-model=./empty_head"], "no weights. Add"),
    "a head of a deeper target": (
        ["--model=./whole", "--draft-head=./head"],
        f"head/config.json: {AUX_LAYER_IDS} = [1, 2, 3], but the target model has only "
        "the layers 0 to 1. Use a head that was trained for this target model",
    ),
    "a head of a wider target": (
        [*DEEP, "--draft-model=./wide_head"],
        "wide_head/config.json: target_hidden_size = 96, but the target model's hidden_size is 64",
    ),
    "a head of other ids": (
        ["--model=./other_ids", "--draft-head=./head"],
        "head/config.json: vocab_size = 320, but the target model's vocab_size is 321. Use a head",
    ),
    "a head for a target of other code": (
        [*DEEP, "--draft-head=./head", "--set=model.implementation=transformers"],
        "head: draft heads need a target model that the native code runs, but transformers runs "
        "this one. Remove the head",
    ),
    "a head in the place of a draft model": (
        [*DEEP, "--drafter=model", "--draft-model=./head"],
        "drafter 'model' needs a draft model, but drafter.model = './head' is a head. Use "
        "drafter.name = 'eagle', or name the head in drafter.head (--draft-head)",
    ),
    "a drafter without its head": (
        [*DEEP, "--drafter=eagle"],
        "drafter 'eagle', or auto with only this source, needs a head for the target model. Set "
        "drafter.head (--draft-head)",
    ),
    "a source without its head": (
        [*DEEP, '--set=drafter.options.sources=["eagle"]'],
        "needs a head for the target model. Set drafter.head (--draft-head)",
    ),
    "a draft model in the place of a head": (
        [*DEEP, "--drafter=eagle", "--draft-model=./whole"],
        "drafter 'eagle' does not use drafter.model = './whole', which is not a head. Use "
        "drafter.name = 'auto', which runs both, or name the head there (--draft-model)",
    ),
    "a draft model beside a head that guesses alone": (
        [*DEEP, "--drafter=eagle", "--draft-model=./whole", "--draft-head=./head"],
        "'auto', which runs both, or remove drafter.model (--draft-model)",
    ),
    "two heads": (
        [*DEEP, "--draft-model=./head", "--draft-head=./head"],
        "drafter.model = './head' and drafter.head = './head' are both heads. Name only one",
    ),
    "a head that is to be rounded": (
        [*DEEP, "--draft-model=./head", "--draft-quantize=w8"],
        "drafter.quantize = 'w8' does not apply to heads. Remove it",
    ),
    "a head that no source runs": (
        [*DEEP, "--draft-head=./head", '--set=drafter.options.sources=["ngram"]'],
        "drafter.head = './head' has no effect: no source in drafter.options.sources runs it. Add "
        "the source 'eagle'",
    ),
    "a head in the place of a draft model that no source runs": (
        [*DEEP, "--draft-model=./head", '--set=drafter.options.sources=["ngram", "model"]'],
        "drafter.model = './head' has no effect: no source in drafter.options.sources runs it. Add "
        "the source 'eagle'",
    ),
    "a draft model that no source runs beside a head": (
        [
            *(*DEEP, "--draft-model=./whole", "--draft-head=./head"),
            '--set=drafter.options.sources=["eagle"]',
        ],
        "drafter.model = './whole' has no effect: no source in drafter.options.sources runs it. "
        "Add the source 'model'",
    ),
    "a head beside a drafter that has no use for it": (
        [*DEEP, "--draft-head=./head", "--drafter=none"],
        "drafter.name = 'none' does not use drafter.head = './head'. Remove one of them",
    ),
    "a head beside somebody's own drafter": (
        [*DEEP, "--draft-head=./head", "--drafter=json:JSONDecoder"],
        "drafter.name = 'json:JSONDecoder' does not use drafter.head = './head'. Remove one",
    ),
    "a context that is too long": (
        ["--model=./whole", "--set=scheduler.max_model_len=513"],
        "exceeds the model's 512 positions",
    ),
    "an unknown key": (["--model=./whole", "--set=memory.blocksize=1"], "memory.block_size?"),
    "a value out of range": (["--model=./whole", "--set=memory.kv_fraction=2"], "kv_fraction"),
    "no config file": (["--model=./whole", "--config=gone.toml"], "gone.toml"),
}
FOR_ALL = "no folder", "no tokenizer", "an unknown drafter"
TABLE = [("serve", *mistake) for mistake in MISTAKES.values()]
TABLE += [(command, *MISTAKES[name]) for command in ("generate", "chat") for name in FOR_ALL]


def test_a_head_is_resolved_to_the_same_by_either_key(models):
    """drafter.model may name a head, as docs/heads.md states; the result never calls it a
    draft model.
    """
    model, head, small = ({key: str(models / name)} for key, name in PLACES)
    by_model, by_head, both, none = (
        resolve_drafters(load_config(None, model | named))
        for named in ({"drafter.model": head["drafter.head"]}, head, head | small, small)
    )
    assert by_model == by_head
    assert (by_head.draft, by_head.head, by_head.runs_head) == (None, str(models / "head"), True)
    assert (both.draft, both.head) == (str(models / "whole"), str(models / "head"))
    assert (none.draft, none.head, none.needs_head) == (str(models / "whole"), None, False)


PLACES = ("model.path", "deep"), ("drafter.head", "head"), ("drafter.model", "whole")


@pytest.fixture(scope="module")
def refusal(models, tmp_path_factory):
    """As `refusals`, in the folder of the models."""
    with refusals(tmp_path_factory.mktemp("said")) as run:
        yield partial(run, models)


@pytest.mark.parametrize(("command", "args", "complaint"), TABLE)
def test_a_mistake_is_reported_before_torch_is_imported(refusal, command, args, complaint):
    assert complaint in refusal(command, *args)


def test_a_port_that_is_taken_is_reported_before_torch_is_imported(refusal):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "cannot listen" in refusal("serve", "./whole", f"--port={port}")


@pytest.mark.parametrize(("text", "words"), [(None, "cannot be read"), ("# none", "no API key")])
def test_a_key_file_that_is_without_effect_is_reported_before_torch_is_imported(
    refusal, tmp_path, text, words
):
    if text is not None:
        (tmp_path / "keys").write_text(text)
    assert words in refusal("serve", "./whole", f"--api-key-file={tmp_path / 'keys'}")


def test_a_command_that_would_import_torch_is_seen():
    """So the tests above do fail if torch is imported."""
    code = COMMANDS_IN_FORKS.replace("from specserve.cli.command import main", "import torch")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "torch is imported" in done.stderr


LIGHT = [
    "specserve.cli.command",
    "specserve.server.serve",
    *(f"specserve.exchange.{path.stem}" for path in EXCHANGE.glob("[a-z]*.py")),
    "specserve_drafters.ngram",
    "specserve_drafters.model",
]


IMPORTS = f"""
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *({{*{HEAVY}, 'numpy'}} & set(sys.modules)))
"""


def test_what_the_http_process_imports_is_light():
    command = [sys.executable, "-c", IMPORTS, *LIGHT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.stderr) == (LIGHT, "")
