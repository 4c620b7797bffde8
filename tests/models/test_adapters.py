import json
import os
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specserve.errors import ConfigError
from specserve.models import adapter_config, adapters
from specserve.models.adapters import adapter_bytes, fused_maps, read_adapter
from specserve.models.layer_reader import rows_of_qkv
from specserve.models.loader import load_decoder
from specserve.models.parse_config import load_config
from specserve_kernels import reference
from tests.checkpoints import save_quietly, tiny_checkpoint

# peft asks transformers for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

MAX_RANK = 8
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma2": {},
    "glm4": {},
}
PATTERNS = {  # in the order of their names, as peft saves them: the first that matches counts
    "rank_pattern": {"_proj": 1, "layers.0.self_attn.*": 3, "o_proj": 6},
    "alpha_pattern": {"down_proj": -3, r"layers\.\d\.mlp\.(gate|gate_up)_proj": 2.5, "o_proj": 5},
}
TOLD = {"r": 4, "lora_alpha": 12, "use_rslora": True, "target_modules": "all-linear"} | PATTERNS


def peft_model(folder, **told):
    """A model and a random adapter."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(model, LoraConfig(**told))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def deltas(model):
    """By module, what peft adds to its weight."""
    modules = model.base_model.model.named_modules()
    adapted = {name: m for name, m in modules if hasattr(m, "get_delta_weight")}
    return {name: m.get_delta_weight("default").detach() for name, m in adapted.items()}


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_map_changes_by_what_peft_adds(tmp_path, family):
    config = load_config(tiny_checkpoint(tmp_path, family, **FAMILIES[family]))
    model = peft_model(tmp_path, **TOLD)
    model.save_pretrained(tmp_path / "adapter")
    added, adapter = (
        deltas(model),
        read_adapter(tmp_path / "adapter", config, MAX_RANK, torch.float32),
    )
    for i, layer in enumerate(adapter.layers):
        for name, parts in fused_maps(config, i).items():
            down, up = layer[name]
            assert len(down) == up.shape[1] == MAX_RANK * len(parts)
            want = torch.cat([added[part.module] for part in parts])
            rows = rows_of_qkv(config) if name == "qkv" else None
            want = want if rows is None else want[rows]
            torch.testing.assert_close(up @ down, want, rtol=1e-5, atol=1e-5 * want.abs().max())


@pytest.mark.parametrize("family", ["llama", "phi3", "glm4"])
def test_rows_are_in_the_order_of_the_decoder_s_own_weights(tmp_path, family):
    folder = tiny_checkpoint(tmp_path / "base", family, **FAMILIES[family])
    model = peft_model(folder, r=4, target_modules="all-linear")
    model.save_pretrained(tmp_path / "adapter")
    save_quietly(model.merge_and_unload(), tmp_path / "merged")
    base, merged = (
        load_decoder(path, "fp32", reference).weights.layers
        for path in (folder, tmp_path / "merged")
    )
    config = load_config(folder)
    adapter = read_adapter(tmp_path / "adapter", config, MAX_RANK, torch.float32)
    for before, after, changes in zip(base, merged, adapter.layers, strict=True):
        for name, (down, up) in changes.items():
            change = getattr(after, name) - getattr(before, name)
            torch.testing.assert_close(up @ down, change, rtol=1e-4, atol=1e-4)


def test_what_an_adapter_does_not_change_is_absent_and_parts_are_zero(tmp_path):
    config = load_config(tiny_checkpoint(tmp_path))
    told = {"layers_to_transform": [1], "target_modules": ["q_proj", "v_proj", "up_proj"]}
    peft_model(tmp_path, r=2, **told).save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", config, MAX_RANK, torch.bfloat16)
    first, second = adapter.layers
    assert adapter.rank == 2
    assert not first
    assert second.keys() == {"qkv", "gate_up"}
    assert not second["gate_up"].down[:MAX_RANK].any(), "a gate is changed"
    used = second["qkv"].down.any(dim=1).nonzero().flatten().tolist()
    assert used == [0, 1, 2 * MAX_RANK, 2 * MAX_RANK + 1]
    assert second["qkv"].up.any(dim=0).nonzero().flatten().tolist() == used


def test_the_scaling_is_multiplied_in_float32_and_rounded_once(tmp_path):
    config, folder = load_config(tiny_checkpoint(tmp_path)), tmp_path / "adapter"
    tensors = write_adapter(folder, lora_alpha=0.7)
    adapter = read_adapter(folder, config, MAX_RANK, torch.bfloat16)
    want = (tensors[B].double() * (0.7 / 2)).float().bfloat16()
    assert torch.equal(adapter.layers[0]["out"].up[:, :2], want)


def test_the_bytes_are_those_of_an_adapter_of_every_map(tmp_path):
    config = load_config(tiny_checkpoint(tmp_path))
    peft_model(tmp_path, r=2, target_modules="all-linear").save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", config, MAX_RANK, torch.bfloat16)
    tensors = [t for layer in adapter.layers for change in layer.values() for t in change]
    assert sum(t.nbytes for t in tensors) == adapter_bytes(config, MAX_RANK, torch.bfloat16)


def test_experts_are_no_part_of_an_adapter(tmp_path):
    config = load_config(tiny_checkpoint(tmp_path, "qwen3_moe"))
    peft_model(tmp_path, target_modules=["k_proj", "o_proj"]).save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", config, MAX_RANK, torch.float32)
    assert all(layer.keys() == {"qkv", "out"} for layer in adapter.layers)


OUT = "model.layers.0.self_attn.o_proj"
A, B = (f"base_model.model.{OUT}.lora_{x}.weight" for x in "AB")


def write_adapter(folder, tensors=None, **told):
    """An adapter of one map of `tiny_checkpoint`; None in `tensors` leaves one out."""
    folder.mkdir(exist_ok=True)
    fields = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["0.self_attn.o_proj"],
    }
    generator = torch.Generator().manual_seed(0)
    written = {
        A: torch.randn(2, 64, generator=generator),
        B: torch.randn(64, 2, generator=generator),
    }
    written = {k: t for k, t in (written | (tensors or {})).items() if t is not None}
    (folder / "adapter_config.json").write_text(json.dumps(fields | told))
    save_file(written, folder / "adapter_model.safetensors")
    return written


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return load_config(tiny_checkpoint(tmp_path_factory.mktemp("base")))


def digest(config, folder, dtype=torch.float32):
    return read_adapter(folder, config, MAX_RANK, dtype).digest


def test_a_digest_is_of_the_content(config, tmp_path):
    tensors = write_adapter(tmp_path)
    first = digest(config, tmp_path)
    save_file(dict(reversed(tensors.items())), tmp_path / "adapter_model.safetensors", {"a": "b"})
    assert digest(config, tmp_path) == first
    write_adapter(tmp_path, lora_alpha=99, alpha_pattern={"o_proj": 4}, lora_dropout=0.5)
    assert digest(config, tmp_path, torch.bfloat16) == first, "neither scaling nor tensors differ"


def flipped(tensor):
    bits = tensor.clone().view(torch.int32)
    bits[-1, -1] ^= 1
    return bits.view(torch.float32)


def test_a_digest_differs_after_any_change(config, tmp_path):
    tensors = write_adapter(tmp_path)
    digests = {digest(config, tmp_path)}
    for changed in (
        {"tensors": {A: flipped(tensors[A])}},
        {"tensors": {B: flipped(tensors[B])}},
        {"tensors": {name: t.half() for name, t in tensors.items()}},
        {"lora_alpha": 4.5},
        {"use_rslora": True},
        {"r": 3, "tensors": {A: torch.randn(3, 64), B: torch.randn(64, 3)}},
    ):
        write_adapter(tmp_path, **changed)
        digests.add(digest(config, tmp_path))
    assert len(digests) == 7


def test_patterns_match_as_in_peft():
    modules = [f"model.layers.{i}.self_attn.{x}_proj" for i in (1, 11) for x in "qkvo"]
    patterns = [
        *("q_proj", "proj", "_proj", "1.self_attn.q_proj", "layers.1", ".*", "[qk]_proj|v_proj"),
        *("model.layers.1.self_attn.o_proj", "^model.*k_proj", "^self_attn.k_proj", "(?i:Q_PROJ)"),
        *("1+.self_attn.v_proj", "", ".q_proj", r".*\.1\..*"),
    ]
    for start in range(len(patterns)):
        rotated = patterns[start:] + patterns[:start]
        told = dict(zip(rotated, range(1, 99), strict=False))
        fields = {"peft_type": "LORA", "target_modules": ["q_proj"], "rank_pattern": told}
        ranks = adapter_config.parse(fields).rank_of
        for module in modules:
            assert ranks(module) == told.get(get_pattern_key(told, module), 8)


@pytest.mark.parametrize(
    "told",
    [
        {"target_modules": ["q_proj", "model.layers.0.self_attn.o_proj"]},
        {"target_modules": ["proj", "attn.k_proj"], "layers_to_transform": 1},
        {
            "target_modules": ["o_proj", "model.layers.0.self_attn.q_proj"],
            "layers_to_transform": [1],
        },
        {"target_modules": ["o_proj"], "layers_to_transform": [0, 5], "layers_pattern": "layers"},
        {"target_modules": ["o_proj"], "layers_to_transform": []},
        {"target_modules": r".*\.1\.self_attn\.[qk]_proj", "exclude_modules": ".*k_proj"},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["0.self_attn.q_proj"]},
        {"target_modules": ["self.attn.q_proj"]},
    ],
)
def test_target_modules_are_those_of_peft(told):
    ours = adapter_config.parse({"peft_type": "LORA"} | told)
    for module in (f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qko"):
        assert ours.is_target(module) == bool(
            check_target_module_exists(LoraConfig(**told), module)
        )


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA' is not supported, only 'LORA'"),
        ({"peft_type": None}, "peft_type = None is not supported"),
        ({"task_type": "SEQ_CLS"}, "task_type = 'SEQ_CLS' .* only 'CAUSAL_LM'"),
        ({"bias": "all"}, "bias = 'all' is not supported, only 'none'"),
        ({"layers_pattern": "h"}, "layers_pattern = 'h' is not supported"),
        *(
            ({key: value}, f"{key} = .* is not supported")
            for key, value in {
                "use_dora": True,
                "modules_to_save": ["lm_head"],
                "lora_bias": True,
                "trainable_token_indices": [1],
                "layer_replication": [[0, 1], [0, 1]],
                "target_parameters": ["mlp.experts.down_proj"],
                "fan_in_fan_out": True,
                "alora_invocation_tokens": [1, 2],
                "use_qalora": True,
                "megatron_config": {"a": 1},
                "some_field_of_later_versions": 0.5,
            }.items()
        ),
        ({"init_lora_weights": "pissa_niter_4"}, ".*path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights = 'loftq' is not supported"),
        ({"r": 0}, "r = 0 must be a whole number from 1"),
        ({"r": True}, "r = True must be a whole number from 1"),
        ({"lora_alpha": "8"}, "lora_alpha = '8' must be a number from"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan must be a number from"),
        ({"use_rslora": 1}, "use_rslora = 1 must be true or false"),
        ({"rank_pattern": [1]}, "rank_pattern = .* must be an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj = 0 must be a whole number"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern: q_proj = None must be a number"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern: .* is not a regular expression"),
        ({"target_modules": None}, "target_modules = None does not name any module"),
        ({"target_modules": [1]}, "target_modules = .* must be names or a regular expression"),
        ({"target_modules": "("}, r"'\(' is not a regular expression"),
        ({"exclude_modules": 1}, "exclude_modules = 1 must be names or a regular expression"),
        ({"layers_to_transform": "1"}, "layers_to_transform = '1' must be layer numbers"),
        (
            {"layers_to_transform": 0, "target_modules": ".*o_proj"},
            "layers_to_transform needs a list of target_modules",
        ),
        ({"exclude_modules": "a|" * 40_000}, "the regular expression '.* is too large"),
        ({"target_modules": "(?:o{1000}){999}"}, "the regular expression '.*' is too large"),
        ({"rank_pattern": {"a{2,99999999999}": 2}}, "rank_pattern: .* is too large: at most"),
    ],
)
def test_a_config_is_refused_by_the_name_of_its_field(config, tmp_path, told, message):
    write_adapter(tmp_path, **told)
    with pytest.raises(ConfigError, match=rf"adapter_config\.json: {message}.*\. Use an"):
        digest(config, tmp_path)


def test_modules_by_name_are_found_however_many_there_are(config, tmp_path):
    write_adapter(tmp_path)
    want = digest(config, tmp_path)
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    others = [f"layers.{i}.absent" for i in range(40_000)]
    write_adapter(tmp_path, target_modules=[*others, *told["target_modules"]])
    assert digest(config, tmp_path) == want


def test_an_expression_that_never_ends_is_refused_after_a_while(config, tmp_path):
    for field in ("target_modules", "exclude_modules"):
        write_adapter(tmp_path, **{field: "(.*)" * 9 + r"\1\2[!?]"})
        with pytest.raises(ConfigError, match=r"adapter_config.json: .* takes? too long\. Use an"):
            digest(config, tmp_path)


def test_a_file_is_read_as_far_as_an_adapter_can_be_large(config, tmp_path, monkeypatch):
    write_adapter(tmp_path, r=2)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    with (tmp_path / "adapter_model.safetensors").open("ab") as file:
        file.truncate(1 << 33)  # of which nothing is on the disk
    with pytest.raises(ConfigError, match=r"exceeds \d+ bytes, the maximum for lora\.max_rank"):
        digest(config, tmp_path)
    with (tmp_path / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(size - 10)
    with pytest.raises(ConfigError, match="is not a valid safetensors file"):
        digest(config, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match="the header is too large"):
        digest(config, tmp_path)


WHOLE = r"specserve adapts only the linear maps of layers. Merge the adapter"


@pytest.mark.parametrize("rows", [2, 60_000], ids=["small", "larger than any adapter"])
@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.base_layer.weight",
        "base_model.model.model.norm.modules_to_save.weight",
    ],
)
def test_an_adapter_of_the_embedding_or_head_is_refused_with_this_reason(
    config, tmp_path, name, rows
):
    write_adapter(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(rows, 64)}, file)
    with pytest.raises(ConfigError, match=rf"the tensor {name} changes the .*\. {WHOLE}"):
        digest(config, tmp_path)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_target_modules_beyond_layers_are_refused_with_this_reason(config, tmp_path, module):
    write_adapter(tmp_path, target_modules=["o_proj", module])
    with pytest.raises(ConfigError, match=rf"json: target_modules includes .*{module}\. {WHOLE}"):
        digest(config, tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_git_lfs_pointer_of_an_adapter_is_named_as_one(config, tmp_path, name):
    write_adapter(tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(ConfigError, match=rf"{name} is a Git LFS pointer"):
        digest(config, tmp_path)


def test_a_config_is_read_as_far_as_one_can_be_large(config, tmp_path):
    write_adapter(tmp_path)
    with (tmp_path / "adapter_config.json").open("a") as file:
        file.write(" " * (1 << 20))
    with pytest.raises(ConfigError, match=r"adapter_config\.json exceeds 1048576 bytes"):
        digest(config, tmp_path)


def test_many_expressions_take_no_longer_than_one(config, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_config, "SECONDS", 0.1)
    write_adapter(
        tmp_path, rank_pattern={f"(a|b{i})*[c-{chr(100 + i % 20)}]": 2 for i in range(20000)}
    )
    with pytest.raises(ConfigError, match="take too long"):
        digest(config, tmp_path)


def test_a_config_outside_of_the_folder_is_not_read(config, tmp_path):
    write_adapter(tmp_path / "adapter")
    secret = tmp_path / "secret.json"
    secret.write_text('{"peft_type": "LORA", "password": "123"}')
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    (tmp_path / "adapter" / "adapter_config.json").symlink_to(secret)
    with pytest.raises(ConfigError, match="outside of the folder") as refused:
        digest(config, tmp_path / "adapter")
    assert "123" not in str(refused.value)


def test_what_is_hashed_is_what_is_used(config, tmp_path, monkeypatch):
    """Also where the file is written to in between."""
    write_adapter(tmp_path)
    want = read_adapter(tmp_path, config, MAX_RANK, torch.float32)
    load = adapters.load

    def load_and_change(data):
        tensors = load(data)
        (tmp_path / "adapter_model.safetensors").write_bytes(b"0" * len(data))
        return tensors

    monkeypatch.setattr(adapters, "load", load_and_change)
    got = read_adapter(tmp_path, config, MAX_RANK, torch.float32)
    assert got.digest == want.digest
    assert torch.equal(got.layers[0]["out"].up, want.layers[0]["out"].up)


def named(module, matrix="A"):
    return f"base_model.model.{module}.lora_{matrix}.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        *(
            (
                name,
                torch.zeros(2, 64),
                re.escape(f"the tensor {name} changes an unsupported module"),
            )
            for name in (
                named("model.layers.0.mlp.experts.3.up_proj"),
                named("model.layers.2.self_attn.o_proj"),
                named("model.layers.0.self_attn.qkv_proj"),
                f"base_model.model.{OUT}.lora_magnitude_vector",
                f"{OUT}.lora_A.weight",
            )
        ),
        (A, None, re.escape(f"{A} is missing, but its module has the other one")),
        (B, None, re.escape(f"{B} is missing, but its module has the other one")),
        (A, torch.zeros(3, 64), r"_A\.weight has the shape \[3, 64\], but .* require \[2, 64\]"),
        (B, torch.zeros(63, 2), r"_B\.weight has the shape \[63, 2\], but .* require \[64, 2\]"),
        (A, torch.zeros(128), r"_A\.weight has the shape \[128\]"),
        (
            B,
            torch.zeros(64, 2).double(),
            r"_B\.weight has the dtype float64.*: float32, ",
        ),
        (A, torch.zeros(2, 64).int(), r"_A\.weight has the dtype int32.*: float32"),
        (A, torch.full((2, 64), float("nan")), r"_A\.weight has values that are not finite"),
        (B, torch.full((64, 2), 3e38), "not finite, or not after scaling. Download"),
        (
            named("model.layers.1.self_attn.o_proj"),
            torch.zeros(2, 64),
            "layers.1.self_attn.o_proj has tensors, but is not in target_modules",
        ),
    ],
)
def test_tensors_are_refused_by_name(config, tmp_path, name, tensor, message):
    write_adapter(tmp_path, {name: tensor})
    with pytest.raises(ConfigError, match=rf"adapter_model\.safetensors: .*{message}"):
        digest(config, tmp_path)


def test_a_target_without_tensors_is_refused(config, tmp_path):
    write_adapter(tmp_path, target_modules=["o_proj"])
    with pytest.raises(ConfigError, match=r"1\.self_attn\.o_proj has no tensors, but is in target"):
        digest(config, tmp_path)
    write_adapter(tmp_path, {A: None, B: None}, target_modules=["c_attn"])
    with pytest.raises(ConfigError, match=r"has no tensors\. Download the adapter again"):
        digest(config, tmp_path)


def test_a_rank_above_the_largest_names_the_knob(config, tmp_path):
    write_adapter(tmp_path)
    with pytest.raises(
        ConfigError, match=r"has rank 2, and the maximum is 1.* lora\.max_rank to 2"
    ):
        read_adapter(tmp_path, config, 1, torch.float32)


def test_only_safetensors_are_read(config, tmp_path):
    write_adapter(tmp_path)
    os.rename(tmp_path / "adapter_model.safetensors", tmp_path / "adapter_model.bin")
    with pytest.raises(
        ConfigError, match=r"adapter_model\.bin is a pickle.*safe_serialization=True"
    ):
        digest(config, tmp_path)
    os.remove(tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors is missing\. Download"):
        digest(config, tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_what_is_no_whole_file_of_the_folder_is_refused(config, tmp_path, name):
    write_adapter(tmp_path / "adapter")
    file, other = tmp_path / "adapter" / name, tmp_path / name

    def refusal():
        with pytest.raises(ConfigError) as e:
            digest(config, tmp_path / "adapter")
        return str(e.value)

    os.rename(file, other)
    assert f"{file} is missing" in refusal()
    file.write_bytes(other.read_bytes()[:-1])
    assert re.search(rf"{file} is not (a )?valid .*\. Download", refusal())
    os.remove(file)
    file.symlink_to(other)
    assert f"{file} is a link to" in refusal()
    os.remove(file)
    os.mkfifo(file)
    assert f"{file} is a pipe, a socket or a device" in refusal()
    os.remove(file)
    file.mkdir()
    assert str(file) in refusal()
