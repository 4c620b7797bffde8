"""Models that are traps: nothing that comes with a model runs or leaves its folder.

Each is started by the command, as target and as draft model, with code in it that would write a
file, the canary.
"""

import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import tiny_checkpoint
from tests.server.asking import CHAT, COMPLETIONS, MESSAGES, completion_body
from tests.server.server_process import ServerProcess

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CODE = "open({canary!r}, 'w').close()\nclass Evil: pass\nclass Config(Evil): pass\n"
TEMPLATE = "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}" + (
    "{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}"
)


class Touches:
    """An object whose pickle makes a file where it is read."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (Path(self.canary),)


def change(path, **fields):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))


def code(folder, canary):
    """Files of code beside the model, named by its config and its tokenizer's."""
    for name in ("evil.py", "modeling_evil.py", "__init__.py", "conftest.py", "setup.py"):
        (folder / name).write_text(CODE.format(canary=canary))
    autos = "AutoConfig", "AutoModel", "AutoModelForCausalLM"
    change(folder / "config.json", auto_map={auto: "evil.Evil" for auto in autos})
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})


def pickles_too(folder, canary):
    """Pickles beside safetensors."""
    for name in ("pytorch_model.bin", "model.pt", "optimizer.pth", "training_args.bin"):
        torch.save(Touches(canary), folder / name)


def template(folder, canary):
    (folder / "chat_template.jinja").write_text(TEMPLATE.format(canary=canary))


def own_architecture(folder, canary):
    code(folder, canary)
    change(folder / "config.json", architectures=["EvilForCausalLM"], model_type="evil")


def own_tokenizer(folder, canary):
    code(folder, canary)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    change(folder / "tokenizer_config.json", tokenizer_class="Evil")


def pickle(name):
    def only(folder, canary):
        (folder / SINGLE).unlink()
        torch.save(Touches(canary), folder / name)

    return only


def old_index(folder, canary):
    pickle("pytorch_model-00001-of-00001.bin")(folder, canary)
    change(folder / "pytorch_model.bin.index.json", weight_map=dict.fromkeys("ab", "x.bin"))


def named_single(folder, canary):
    torch.save(Touches(canary), folder / SINGLE)


def mapped(name):
    """An index whose weights are in this file, which lies beside the folder."""

    def write(folder, canary):
        names = load_file(folder / SINGLE)
        outside = folder.parent / "outside.safetensors"
        (folder / SINGLE).rename(outside)
        torch.save(Touches(canary), folder / "pytorch_model.bin")
        (folder / "link.safetensors").symlink_to(outside)
        where = name.format(outside=outside, name=folder.name)
        change(folder / INDEX, weight_map=dict.fromkeys(names, where))

    return write


def linked(name):
    """One of the small files is a link to one beside the folder."""

    def link(folder, canary):
        (folder / name).parent.mkdir(exist_ok=True)
        outside = folder.parent / f"outside-{folder.name}"
        if (folder / name).exists():
            (folder / name).rename(outside)
        else:
            outside.write_text("[]")
        (folder / name).symlink_to(outside)

    return link


def linked_folder(folder, canary):
    outside = folder.parent / f"outside-{folder.name}"
    outside.mkdir()
    (outside / "default.jinja").write_text("secret")
    (folder / "additional_chat_templates").symlink_to(outside)


HARMLESS = {"code": code, "pickles too": pickles_too, "template": template}
REFUSED = {  # what is done to a folder -> words of the line
    "an architecture of its own": (own_architecture, "EvilForCausalLM"),
    "a tokenizer of its own": (own_tokenizer, "the tokenizer cannot be loaded"),
    "a .bin": (pickle("pytorch_model.bin"), "Convert them to safetensors"),
    "a .pt": (pickle("model.pt"), "Convert them to safetensors"),
    "an index of pickles": (old_index, "Convert them to safetensors"),
    "a pickle by another name": (named_single, "is not a valid safetensors file"),
    "a pickle in the index": (
        mapped("pytorch_model.bin"),
        "not a *.safetensors file of this folder",
    ),
    "a way out": (mapped("../outside.safetensors"), "not a *.safetensors file of this folder"),
    "a way out and back": (
        mapped("../{name}/link.safetensors"),
        "not a *.safetensors file of this",
    ),
    "an absolute path": (mapped("{outside}"), "not a *.safetensors file of this folder"),
    "a link": (mapped("link.safetensors"), "outside of the folder"),
    "config.json is a link": (linked("config.json"), "outside of the folder"),
    "tokenizer.json is a link": (linked("tokenizer.json"), "outside of the folder"),
    "the tokenizer's config is a link": (
        linked("tokenizer_config.json"),
        "outside of the folder",
    ),
    "the template is a link": (linked("chat_template.jinja"), "outside of the folder"),
    "another template is a link": (
        linked("additional_chat_templates/default.jinja"),
        "outside of the folder",
    ),
    "the folder of templates is a link": (linked_folder, "outside of the folder"),
}


@pytest.fixture
def trap(tmp_path):
    """Makes a folder a trap; its canary."""
    canary = tmp_path / "canary"

    def spoil(folder, do):
        do(folder, str(canary))
        return folder

    spoil.canary = canary
    return spoil


def test_the_canary_works(trap, tmp_path):
    """Else the tests below would say nothing."""
    code(tiny_checkpoint(tmp_path / "m"), str(trap.canary))
    subprocess.run([sys.executable, tmp_path / "m" / "evil.py"], check=True)
    assert trap.canary.exists()
    trap.canary.unlink()
    torch.save(Touches(str(trap.canary)), tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert trap.canary.exists()


def test_what_a_model_brings_next_to_its_weights_is_never_run(trap, tmp_path):
    """As target and as draft model, with all of it at once."""
    models = [tiny_checkpoint(tmp_path / name) for name in ("target", "draft")]
    for folder, do in product(models, HARMLESS.values()):
        trap(folder, do)
    flags = [f"--draft-model={models[1]}", "--drafter=model"]
    with ServerProcess(models[0], *flags, env={"PYTHONDONTWRITEBYTECODE": "1"}) as server:
        assert server.post(COMPLETIONS, completion_body()).status == 200
        refusal = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 2})
        assert refusal.status == 400 and "unsafe" in refusal.body["error"]["message"]
    assert not trap.canary.exists()


# A draft model is checked by the same code: of each part of it one, every day.
DRAFTS = ("a tokenizer of its own", "a .bin", "a pickle in the index", "config.json is a link")
ROLES = [("target", name) for name in REFUSED]
ROLES += [
    pytest.param("draft", name, marks=() if name in DRAFTS else pytest.mark.slow)
    for name in REFUSED
]


@pytest.mark.parametrize(("role", "name"), ROLES)
def test_a_trap_is_refused_in_one_line(trap, tmp_path, folder, name, role):
    do, words = REFUSED[name]
    bad = trap(shutil.copytree(folder, tmp_path / "bad"), do)
    models = [bad] if role == "target" else [folder, f"--draft-model={bad}", "--drafter=model"]
    told = subprocess.run(
        [sys.executable, "-m", "specserve", "serve", *map(str, models), "--port=0"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert told.returncode == 1, told.stderr
    lines = [line for line in told.stderr.splitlines() if "its weights need" not in line]
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(lines) == len(errors) == 1, told.stderr
    assert words in errors[0] and not trap.canary.exists()
