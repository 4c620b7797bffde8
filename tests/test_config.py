from pathlib import Path

import msgspec
import pytest

from specserve.cli import command as cli
from specserve.config import (
    KNOBS,
    Config,
    load_config,
    parse_override,
    parse_overrides,
    python_config,
    to_toml,
)
from specserve.errors import ConfigError
from specserve_drafters.base import Auto

PRESETS = {
    "auto": "auto",
    "off": "none",
    "ngram": "ngram",
    "draft-model": "auto",
    "suffix": "auto",
    "recycle": "auto",
    "h200-llama-8b": "auto",
    "h200-qwen3-8b": "auto",
}
CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_names_its_drafter(name):
    assert load_config(CONFIGS / f"{name}.toml").drafter_name == PRESETS[name]


def test_the_preset_of_the_default_has_every_option_at_its_default():
    written = load_config(CONFIGS / "auto.toml").drafter.options
    assert msgspec.convert(written, Auto.Options) == Auto.Options()
    assert written.keys() == {*Auto.Options.__struct_fields__}


def test_several_files_are_merged_in_order(tmp_path):
    texts = {
        "base": '[scheduler]\nmax_running=4\nprefill_chunk=32\n[lora]\nmodules={a="1", b="1"}',
        "mine": '[scheduler]\nmax_running = 8\n[lora.modules]\nb = "2"\nc = "2"',
    }
    files = [tmp_path / f"{name}.toml" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    for config in (load_config(files), python_config("LLM", {}, [*map(str, files)], None)):
        assert (config.scheduler.max_running, config.scheduler.prefill_chunk) == (8, 32)
        assert config.lora.modules == {"a": "1", "b": "2", "c": "2"}
    assert load_config(files[::-1]).scheduler.max_running == 4


MERGED = {  # --set's -> the setting
    "two mappings": (["lora.modules={a='1', b='1'}", "lora.modules={b='2'}"], {"a": "1", "b": "2"}),
    "an option before": (["drafter.options.k=2", "drafter.options={n=3}"], {"n": 3, "k": 2}),
    "an option twice": (["drafter.options.k=2", "drafter.options={k=3}"], {"k": 3}),
    "an option after": (["drafter.options={k=3}", "drafter.options.k=2"], {"k": 2}),
    "the default after": (["lora.modules={a='1'}", "lora.modules="], {}),
}


@pytest.mark.parametrize(("texts", "want"), MERGED.values(), ids=MERGED)
def test_mappings_of_one_key_are_merged(texts, want):
    config = load_config(None, parse_overrides(texts))
    assert want in (config.lora.modules, config.drafter.options)
    assert (config.lora.modules or config.drafter.options) == want


def test_of_single_values_the_last_counts_and_two_lists_are_refused():
    assert parse_overrides(["model.threads=1", "model.threads=2"]) == {"model.threads": 2}
    same = 'server.cors_origins=["https://a.example"]'
    assert len(parse_overrides([same, same])) == 1
    with pytest.raises(ConfigError, match=r"--set server\.cors_origins has two lists"):
        parse_overrides([same, 'server.cors_origins=["https://b.example"]'])


def test_lora_modules_of_several_flags_are_all_kept(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "serve", lambda args: asked.append(args.lora_modules))
    flags = ["--lora-modules", "a=x", "b=y", "--max-loras=3", "--lora-modules", "c=z"]
    assert cli.main(["serve", "model", *flags]) == 0
    assert asked == [["a=x", "b=y", "c=z"]]


def test_no_preset_goes_untested():
    assert {p.stem for p in CONFIGS.iterdir()} == set(PRESETS)


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("[scheduler]\nmax_runing = 4", ["scheduler.max_runing", "mean scheduler.max_running?"]),
        ("[schedular]\nmax_running = 4", ["'schedular'", "[scheduler]"]),
        ("[schedular]", ["'schedular'", "[scheduler]"]),
        ('model = "m"', ["'model'", "[model]"]),
        ("[memory]\nzzz = 4", ["memory.zzz", "specserve config show"]),
        ("[memory]\nblock_size = 0", ["memory.block_size = 0", ">= 1"]),
        ("[memory]\nstate_interval = true", ["interval = True", "Expected an integer, got true"]),
        ('[memory]\nkv_dtype = "int4"', ["memory.kv_dtype = 'int4'", "int8 or fp8"]),
        ("[drafter]\noptions = '{\"a\": 1}'", ["Expected an object, got a string. Write a table"]),
        ("[memory]\nkv_fraction = 1.5", ["memory.kv_fraction = 1.5", "<= 1"]),
        ("[memory]\nkv_fraction = nan", ["memory.kv_fraction = nan", "> 0"]),
        ("[speculation]\nmax_nodes = 64", ["speculation.max_nodes = 64", "0 to 63"]),
        (
            '[model]\ndtype = "fp16"',
            ["model.dtype = 'fp16'", "it must be one of auto, bf16, fp32 (", "bf16 or fp32"],
        ),
        ('[model]\nquantize_head = "w4"', ["set model.quantize", "--set model.quantize_head="]),
        ('[model]\ndevice = "gpu"', ["model.device = 'gpu'", "cuda:1 for the second GPU"]),
        ('[model]\ndevice = "cuda:"', ["model.device = 'cuda:'", "auto, cpu, cuda"]),
        ('[model]\ndevice = "cuda:01"', ["model.device = 'cuda:01'", "auto, cpu, cuda"]),
        ('[model]\ndevice = "cuda:100"', ["model.device = 'cuda:100'", "auto, cpu, cuda"]),
        ("[scheduler]\nmax_batched_tokens = 8", ["max_batched_tokens = 8", "max_running = 64"]),
        ("[scheduler]\nmax_running = 512", ["max_batched_tokens = 512", "lower the second"]),
        ('[model]\npath = "m"\n[drafter]\nname = "model"', ["drafter.model", "--draft-model"]),
        ('[drafter]\nname = "package.module"', ["'package.module'", "package.module:Class"]),
        ('[drafter]\nname = ""', ["drafter.name = ''", "length >= 1"]),
        ('[drafter]\nmodel = ""', ["drafter.model = ''", "length >= 1"]),
        ('[model]\npath = ""', ["model.path = ''", "length >= 1"]),
        (
            '[drafter]\nname = "ngram"\nmodel = "d"',
            ["Remove drafter.name", "or drafter.model", "'d'"],
        ),
        ("[scheduler]\nmax_model_len = 1", ["scheduler.max_model_len = 1", "at least 2"]),
        ("[drafter", ["not TOML"]),
    ],
)
def test_a_mistake_names_the_file_the_key_and_the_remedy(tmp_path, text, complaints):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as e:
        load_config(path)
    assert not [c for c in [str(path), *complaints] if c not in str(e.value)], e.value


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.toml.*Check the path"):
        load_config(tmp_path / "gone.toml")


def test_a_mistake_in_an_override_is_not_blamed_on_the_file():
    with pytest.raises(ConfigError, match=r"^--set: memory\.block_size = 0"):
        load_config(CONFIGS / "ngram.toml", {"memory.block_size": 0})


def test_a_conflict_names_everyone_who_took_part(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[scheduler]\nmax_batched_tokens = 100")
    with pytest.raises(ConfigError, match=r"mine\.toml, --set: .* must exceed"):
        load_config(path, {"scheduler.max_running": 100})


def test_a_draft_model_next_to_a_preset_for_ngrams_names_both_origins():
    with pytest.raises(ConfigError, match=r"ngram\.toml, --set: drafter\.name = 'ngram'"):
        load_config(CONFIGS / "ngram.toml", {"drafter.model": "d"})


def test_overrides_are_stronger_than_the_file():
    config = load_config(CONFIGS / "ngram.toml", {"speculation.max_nodes": 3})
    assert (config.max_nodes, config.drafter.name) == (3, "ngram")


def test_an_override_without_a_value_takes_back_what_the_file_says(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[model]\nquantize = "w4"\nthreads = 3\n[scheduler]\nmax_running = 3\n'
        "[drafter.options]\nmax_ngram = 5\nmin_ngram = 1"
    )
    keys = "model.quantize", "model.threads", "scheduler.max_running", "drafter.options.max_ngram"
    config = load_config(path, dict(parse_override(f"{key}=") for key in keys))
    assert config == load_config(None, {"drafter.options": {"min_ngram": 1}})


def test_one_option_of_a_drafter_can_be_set_next_to_others(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[drafter.options]\nmax_ngram = 5\nmin_ngram = 1")
    config = load_config(path, {"drafter.options.max_ngram": 3})
    assert config.drafter.options == {"max_ngram": 3, "min_ngram": 1}


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({}, "auto"),
        ({"model.path": "m"}, "auto"),
        ({"drafter.model": "d"}, "auto"),
        ({"drafter.model": "d", "drafter.name": "ngram", "speculation.max_nodes": 0}, "none"),
        ({"drafter.name": "mine:Drafter"}, "mine:Drafter"),
        ({"speculation.max_nodes": 0}, "none"),
        ({"speculation.max_step_nodes": 0}, "none"),
    ],
)
def test_who_draft_tokens(overrides, name):
    assert load_config(None, overrides).drafter_name == name


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a.b=3", ("a.b", 3)),
        ("a.b = 0.5", ("a.b", 0.5)),
        ("a.b=true", ("a.b", True)),
        ('a.b="3"', ("a.b", "3")),
        ("a.b=some/folder", ("a.b", "some/folder")),
        ("a.b=x=y", ("a.b", "x=y")),
        ("a.b={n = 1}", ("a.b", {"n": 1})),
        ("a.b=1\nc = 2", ("a.b", "1\nc = 2")),
        ("a.b=", ("a.b", None)),
        ("a.b= ", ("a.b", None)),
        ('a.b=""', ("a.b", "")),
    ],
)
def test_an_override_is_toml_or_else_a_string(text, want):
    assert parse_override(text) == want


def test_an_override_without_an_equals_sign_is_refused():
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_override("speculation.max_nodes")


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"model.path": 'odd "quoted" \\ name\n\x7f é 日', "model.threads": 2},
        {"drafter.options": {"a b": 1, "c": [True, "x", 1e30, {"d": {}}]}},
    ],
)
def test_what_is_shown_can_be_loaded(tmp_path, overrides):
    config = load_config(None, overrides)
    path = tmp_path / "shown.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(path) == config


def test_defaults_are_the_designs():
    s, p = Config().scheduler, Config()
    assert (s.max_running, s.max_batched_tokens, s.prefill_chunk) == (64, 512, 128)
    assert (p.max_nodes, p.max_step_nodes, Config().memory.block_size) == (63, 256, None)
    fixed = load_config(None, {"drafter.name": "ngram"})
    assert (fixed.max_nodes, fixed.max_step_nodes) == (16, 32)


OFF = {"drafter.name": "none"}, {"speculation.max_nodes": 0}, {"speculation.max_step_nodes": 0}


@pytest.mark.parametrize("settings", [*OFF, OFF[0] | {"speculation.max_nodes": 8}], ids=str)
def test_without_speculation_there_are_no_draft_tokens(settings):
    config = load_config(None, settings)
    assert (config.drafter_name, config.max_nodes, config.max_step_nodes) == ("none", 0, 0)


def test_what_is_shown_has_every_key():
    shown = to_toml(Config())
    assert not [key for key in KNOBS if f"{key.split('.')[1]} =" not in shown]
