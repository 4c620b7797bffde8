import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.errors import ConfigError
from specserve.models.loader import load_decoder
from specserve.models.source import open_source
from specserve.models.weight_files import is_at_home
from specserve_kernels import reference
from tests.checkpoints import tiny_checkpoint
from tests.models.forward import logits, prompt

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LAST = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return tiny_checkpoint(tmp_path / "model")


def load(folder):
    return load_decoder(folder, "auto", reference)


def rewrite(folder, edit):
    """Apply `edit` to the tensors of an unsharded checkpoint."""
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)


def shard(folder, names=("model-1-of-2.safetensors", "model-2-of-2.safetensors")):
    """Split an unsharded checkpoint into two files; the weight_map may say otherwise."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    halves = dict.fromkeys(names, None)
    for i, name in enumerate(halves):
        halves[name] = {k: v for j, (k, v) in enumerate(tensors.items()) if j % 2 == i}
        save_file(halves[name], folder / name)
    weight_map = {tensor: name for name, half in halves.items() for tensor in half}
    write_map(folder, weight_map)
    return weight_map


def write_map(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_the_same_model(folder):
    ids = prompt(320, 9)
    want = logits(load(folder), ids, chunks=())
    shard(folder)
    assert torch.equal(logits(load(folder), ids, chunks=()), want)


def test_progress_counts_every_byte_once(folder):
    seen = []
    load_decoder(folder, "fp32", reference, progress=lambda done, total: seen.append((done, total)))
    tensors = load_file(folder / SINGLE)
    total = sum(t.nbytes for t in tensors.values())
    assert seen == sorted(seen)
    assert len(seen) == len(tensors)
    assert seen[-1] == (total, total)


BROKEN = {  # what happened to the tensors -> the complaint
    "one is missing": (lambda t: t.pop(LAST), f"{LAST} is missing.*Download"),
    "one is misshapen": (
        lambda t: t.update({LAST: torch.zeros(128, 63)}),
        rf"{LAST} has the shape \[128, 63\].*\[128, 64\]",
    ),
    "one is flat": (lambda t: t.update({LAST: torch.zeros(128 * 64)}), r"\[8192\].*\[128, 64\]"),
    "one is of integers": (
        lambda t: t.update({LAST: torch.zeros(128, 64, dtype=torch.int8)}),
        f"{LAST} has the dtype I8.*unquantized",
    ),
    "one is too many": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        "q_proj.bias is not part of",
    ),
    "there is a layer more": (
        lambda t: t.update({LAST.replace("1", "2"): torch.zeros(128, 64)}),
        "layers.2.mlp.up_proj.weight is not part of",
    ),
}


@pytest.mark.parametrize(("edit", "complaint"), BROKEN.values(), ids=BROKEN)
def test_tensors_that_the_config_does_not_describe_are_refused(folder, edit, complaint):
    rewrite(folder, edit)
    with pytest.raises(ConfigError, match=complaint):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        *(f"model.layers.0.self_attn.rotary_emb.{b}" for b in ("inv_freq", "sin_cached", "x.y")),
        "model.rotary_emb.inv_freq",
        "model.layers.1.self_attn.cos_cached",
        "sin_cached",
        "model.layers.1.attn.masked_bias",
        "model.embeddings.position_ids",
    ],
)
def test_a_buffer_of_old_checkpoints_is_ignored(folder, name):
    rewrite(folder, lambda t: t.update({name: torch.zeros(8)}))
    load(folder)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.cos_cached.weight", "my_masked_bias"])
def test_a_weight_with_the_name_of_a_buffer_in_its_own_is_refused(folder, name):
    rewrite(folder, lambda t: t.update({name: torch.zeros(8)}))
    with pytest.raises(ConfigError, match=f"the tensor {name} is not part of"):
        load(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 42\n"


@pytest.mark.parametrize(
    "name",
    [
        *(SINGLE, "model-2-of-2.safetensors", INDEX),
        *("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    ],
)
def test_a_git_lfs_pointer_is_named_as_one(folder, name):
    if name != SINGLE:
        shard(folder)
    (folder / name).write_text(POINTER)
    with pytest.raises(ConfigError, match=rf"{name} is a Git LFS pointer, .* `git lfs pull`"):
        source = open_source(folder)
        source.check()
        source.shape("auto")
        source.tokenizer()


def test_a_git_lfs_pointer_next_to_the_model_does_no_harm(folder):
    (folder / "consolidated.safetensors").write_text(POINTER)
    (folder / "results.json").write_text(POINTER)
    open_source(folder).check()
    load(folder)


@pytest.mark.parametrize("size", [0, 5, 100, -1], ids=lambda n: f"cut at {n}")
def test_a_file_cut_short_is_refused(folder, size):
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:size])
    with pytest.raises(ConfigError, match="is not a valid safetensors file"):
        load(folder)


def test_a_damaged_header_is_refused(folder):
    content = bytearray((folder / SINGLE).read_bytes())
    content[8:40] = b"x" * 32
    (folder / SINGLE).write_bytes(content)
    with pytest.raises(ConfigError, match="is not a valid safetensors file"):
        load(folder)


def test_pickles_are_refused(folder):
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pickles.*Convert them to safetensors"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder):
    (folder / SINGLE).unlink()
    with pytest.raises(ConfigError, match=r"no weights\. Add model\.safetensors"):
        load(folder)


def test_a_shard_that_is_not_there_is_refused(folder):
    shard(folder)
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-2-of-2\.safetensors is missing"):
        load(folder)


def test_a_shard_without_the_tensor_it_should_hold_is_refused(folder):
    weight_map = shard(folder)
    first, second = sorted(set(weight_map.values()))
    write_map(folder, weight_map | {LAST: first if weight_map[LAST] == second else second})
    with pytest.raises(ConfigError, match=f"{LAST} is missing from"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, [], {"x": 1}, {"x": None}], ids=str)
def test_an_index_without_a_map_is_refused(folder, weight_map):
    shard(folder)
    write_map(folder, weight_map)
    with pytest.raises(ConfigError, match="weight_map is missing or invalid"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "sub/model.safetensors",
        "./model-1-of-2.safetensors",
        "/etc/model.safetensors",
        "..",
        "",
        "sub\\model.safetensors",
        "pytorch_model.bin",
    ],
)
def test_a_weight_map_must_name_files_of_the_folder(folder, name):
    tiny_checkpoint(folder.parent / "other")
    write_map(folder, shard(folder) | {LAST: name})
    with pytest.raises(ConfigError, match=r"not a \*\.safetensors file of this folder"):
        load(folder)


def test_a_link_out_of_the_folder_is_refused(folder):
    shard(folder)
    outside = folder.parent / "outside.safetensors"
    (folder / "model-2-of-2.safetensors").rename(outside)
    (folder / "model-2-of-2.safetensors").symlink_to(outside)
    with pytest.raises(ConfigError, match="outside of the folder"):
        load(folder)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own blobs", "shared blobs"])
def test_the_links_of_the_hubs_cache_are_followed(tmp_path, is_shared):
    repository = tmp_path / "models--org--name"
    folder = tiny_checkpoint(repository / "snapshots" / ("0" * 40))
    blobs = repository / "blobs"
    blobs.mkdir()
    for name in set(shard(folder).values()):
        blob = blobs / f"etag of {name}"
        (folder / name).rename(blob)
        (folder / name).symlink_to(f"../../blobs/{blob.name}")
        if is_shared:
            store = tmp_path / "blobs" / "ab"
            store.mkdir(parents=True, exist_ok=True)
            blob.rename(store / blob.name)
            blob.symlink_to(f"../../blobs/ab/{blob.name}")
    load(folder)


HOME = "/c/models--org--name/snapshots/0"
PLACES = {  # folder, file -> whether the file is one of the folder's
    "in it": ("/m", "/m/x", True),
    "below it": ("/m", "/m/sub/x", True),
    "beside a folder of a longer name": ("/m", "/m2/x", False),
    "beside it": ("/m", "/x", False),
    "in its blobs": (HOME, "/c/models--org--name/blobs/x", True),
    "in the shared blobs": (HOME, "/c/blobs/ab/x", True),
    "in another's blobs": (HOME, "/c/models--org--other/blobs/x", False),
    "blobs of no snapshot": ("/c/models--org--name/old/0", "/c/models--org--name/blobs/x", False),
    "blobs of no repository": ("/c/name/snapshots/0", "/c/name/blobs/x", False),
}


@pytest.mark.parametrize(("home", "target", "expected"), PLACES.values(), ids=PLACES)
def test_a_file_is_at_home(home, target, expected):
    assert is_at_home(Path(home), Path(target)) is expected


def test_links_to_files_below_the_folder_are_followed(folder):
    (folder / "parts").mkdir()
    for name in {*shard(folder).values(), "tokenizer.json"}:
        (folder / name).rename(folder / "parts" / name)
        (folder / name).symlink_to(f"parts/{name}")
    (folder / "chat_template.jinja").rename(folder / "parts" / "chat.jinja")
    (folder / "chat_template.jinja").symlink_to("parts/chat.jinja")
    open_source(folder).check()
    load(folder)


def test_blobs_may_lie_on_another_disk(tmp_path):
    repository, disk = tmp_path / "models--org--name", tmp_path / "disk"
    folder = tiny_checkpoint(repository / "snapshots" / ("0" * 40))
    disk.mkdir()
    (repository / "blobs").symlink_to(disk)
    for name in {*shard(folder).values(), "tokenizer.json"}:
        (folder / name).rename(disk / name)
        (folder / name).symlink_to(f"../../blobs/{name}")
    open_source(folder).check()
    load(folder)


def test_a_folder_may_have_links_into_the_hubs_cache(folder, monkeypatch):
    cache = folder.parent / "hub"
    blobs = cache / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    for name in {*shard(folder).values(), "tokenizer.json"}:
        (folder / name).rename(blobs / name)
        (folder / name).symlink_to(blobs / name)
    with pytest.raises(
        ConfigError, match=r"is a link to .*, outside of the folder and the hub cache"
    ):
        open_source(folder).check()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    open_source(folder).check()
    load(folder)


def test_a_link_into_another_repository_of_the_cache_is_refused(tmp_path):
    folder = tiny_checkpoint(tmp_path / "models--org--name" / "snapshots" / ("0" * 40))
    shard(folder)
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (folder / "model-2-of-2.safetensors").rename(other / "etag")
    (folder / "model-2-of-2.safetensors").symlink_to(other / "etag")
    with pytest.raises(ConfigError, match="outside of the folder"):
        load(folder)
