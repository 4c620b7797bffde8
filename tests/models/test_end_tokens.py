"""End tokens: every place of a model that names one, and nothing that is none."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models

from specserve.models.end_of_turn import text_after_answer, written
from specserve.models.end_tokens import find_end_tokens, report
from specserve.models.source import open_source
from specserve.text.chat_template import ChatTemplate

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|user|>", "<|im"]
LOOP = "{% for m in messages %}BODY{% endfor %}"
CHATML = LOOP.replace("BODY", "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n")


def model(folder, config=None, generation=None, tokenizer=None, template=None):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    written = {"eos_token": tokenizer, "chat_template": template}
    for name, fields in (("tokenizer_config.json", written), ("config.json", config or {})):
        (folder / name).write_text(json.dumps(fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return open_source(folder)


def ends(*given, **more):
    source = model(*given, **more)
    tokenizer = source.tokenizer()
    found = find_end_tokens(source, tokenizer)
    return {tokenizer.id_to_token(id) or id: names for id, names in found.items()}


PLACES = {  # config.json, generation_config.json, tokenizer's eos, template -> ends by their texts
    "none": ({}, {}, None, None, {}),
    "a base model with chat tokens": (
        {"eos_token_id": 3},
        {"eos_token_id": 3},
        "<|im_end|>",
        None,
        {
            "</s>": ["generation_config.json", "config.json"],
            "<|im_end|>": ["eos_token"],
        },
    ),
    "only the template": (
        {"eos_token_id": 3},
        None,
        None,
        CHATML,
        {"</s>": ["config.json"], "<|im_end|>": ["chat template"]},
    ),
    "all at one": (
        {"eos_token_id": 5},
        {"eos_token_id": [5]},
        "<|im_end|>",
        CHATML,
        {
            "<|im_end|>": [
                "generation_config.json",
                "config.json",
                "eos_token",
                "chat template",
            ]
        },
    ),
    "an ordinary token of an older config": (
        {"eos_token_id": [1, 6]},
        {"eos_token_id": 5},
        None,
        None,
        {"<|im_end|>": ["generation_config.json"], "<|end|>": ["config.json"]},
    ),
    "an ordinary token that only the config names": (
        {"eos_token_id": 1},
        None,
        None,
        None,
        {"b": ["config.json"]},
    ),
}


@pytest.mark.parametrize(("config", "generation", "eos", "template", "want"), PLACES.values())
def test_end_tokens_come_from_every_place(tmp_path, config, generation, eos, template, want):
    assert ends(tmp_path, config, generation, eos, template) == want


TEMPLATES = {  # template -> how the text after an answer begins
    "chatml": (CHATML, "<|im_end|>"),
    "llama 3": (
        LOOP.replace("BODY", "<|h|>{{ m.role }}<|/h|>\n\n{{ m.content | trim }}<|eot_id|>"),
        "<|eot_id|>",
    ),
    "a line before it": (LOOP.replace("BODY", "{{ m.content + '\n' }}<|im_end|>"), "<|im_end|>"),
    "gpt-oss": (
        "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}<|start|>assistant"
        "<|message|>{{ m.content }}<|return|>{% else %}<|message|>{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}",
        "<|return|>",
    ),
    "glm": (LOOP.replace("BODY", "<|{{ m.role }}|>\n{{ m.content }}"), "<|user|>"),
    "it has no open end": (
        "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}" + CHATML,
        "<|im_end|>",
    ),
    "mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "plain": (LOOP.replace("BODY", "{{ m.role }}: {{ m.content }}\n"), "user:"),
    "a refusal": ("{{ raise_exception('never') }}", ""),
    "no answers": ("{{ messages[0].content }}", ""),
    "a mistake": ("{% if %}", ""),
}


@pytest.mark.parametrize(("template", "want"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_writes_something_after_an_answer(template, want):
    text = written(ChatTemplate(template, {"eos_token": "</s>"}))
    assert text.startswith(want) and (want or not text)


def test_the_longest_special_token_is_taken(tmp_path):
    assert [*ends(tmp_path, template=CHATML)] == ["<|im_end|>"]


@pytest.mark.parametrize(("text", "is_end"), [("<|im_stop|>", True), ("stop", False)])
def test_an_added_token_ends_a_text_if_it_is_in_brackets(tmp_path, text, is_end):
    template = CHATML.replace("<|im_end|>", text)
    source = model(tmp_path, template=template)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken(text, special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = source.tokenizer()
    ends = find_end_tokens(source, tokenizer)
    assert ends == ({tokenizer.backend.token_to_id(text): ["chat template"]} if is_end else {})


def test_text_that_is_no_special_token_ends_nothing(tmp_path):
    assert ends(tmp_path, template=LOOP.replace("BODY", "{{ m.content }} b a")) == {}


@pytest.mark.parametrize("bomb", ["{{ 8 ** (9 ** 9) }}", "{{ 'a' * 2 ** 31 }}"])
def test_a_template_that_exceeds_a_limit_names_none(bomb):
    assert text_after_answer(ChatTemplate(CHATML, {})).startswith("<|im_end|>")
    assert text_after_answer(ChatTemplate(CHATML + bomb, {})) == ""


def test_the_report_shows_each_end_token_and_its_places(tmp_path):
    source = model(tmp_path, {"eos_token_id": 3}, template=CHATML)
    tokenizer = source.tokenizer()
    line = report(find_end_tokens(source, tokenizer), tokenizer)
    assert line == "end tokens: </s> 3 (config.json), <|im_end|> 5 (chat template)"
    assert report({}, tokenizer) == "end tokens: none"
