"""The models that are compared: those that are named, or the demo pair at a 0.6B model's cost."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.models.folder import read_json
from specserve_bench.demo.scaled_model import SHAPES
from specserve_bench.scale import scale_model

LIKE = "qwen3-0.6b"
# Two layers of the target's width, with an MLP that makes a tenth of its weights.
TENTH = {"num_hidden_layers": 2, "intermediate_size": 3840}


class Draft(NamedTuple):
    label: str
    folder: Path


class Models(NamedTuple):
    """What the table calls the target, where it is, and the drafts."""

    label: str
    target: Path
    drafts: list[Draft]


def named_models(target: Path, drafts: list[Path], scratch: Path) -> Models:
    return Models(target.name, with_tokenizer(target, scratch), [Draft(d.name, d) for d in drafts])


def scaled_pair(scratch: Path) -> Models:
    """The demo target in the layers of a 0.6B model, and its draft as it is and at a tenth's cost.

    The vocabulary stays the demo's, as the engines want the same in target and draft.
    """
    target, tenth = scratch / "target", scratch / "tenth"
    scale_model(DEMO_TARGET, target, str(shape(scratch / "shape", {})))
    scale_model(DEMO_DRAFT, tenth, str(shape(scratch / "tenth-shape", TENTH)))
    drafts = [Draft("nearly free draft", DEMO_DRAFT), Draft("draft of a tenth", tenth)]
    return Models(f"{DEMO_TARGET.name} in the layers of {LIKE}", target, drafts)


def shape(folder: Path, changes: dict[str, Any]) -> Path:
    """A folder with a config.json that `scale_model` takes as a shape."""
    vocab_size = read_json(DEMO_TARGET / "config.json")["vocab_size"]
    folder.mkdir()
    fields = SHAPES[LIKE] | {"vocab_size": vocab_size} | changes
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def with_tokenizer(folder: Path, scratch: Path) -> Path:
    """The folder, or one that adds the demo's tokenizer: random checkpoints come without one."""
    if (folder / "tokenizer_config.json").exists() or (folder / "tokenizer.json").exists():
        return folder
    complete = scratch / folder.name
    complete.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            (complete / path.name).symlink_to(path.absolute())
        else:
            shutil.copyfile(path, complete / path.name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_TARGET / name, complete / name)
    return complete
