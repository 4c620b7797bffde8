"""The training of EAGLE-3 heads, on sizes that take seconds."""

import json
import re
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from specserve.config import DEMO, DEMO_TARGET
from specserve.errors import ConfigError
from specserve.models.eagle_head import load_eagle_head
from specserve.models.loader import load_decoder
from specserve.models.parse_config import load_config
from specserve_bench.demo import commands, learning, losses, train_head
from specserve_bench.demo.batches import IGNORED, Batch, Corpus
from specserve_bench.demo.head_card import head_words, read_head_card
from specserve_bench.demo.head_figures import measure, rightness
from specserve_bench.demo.head_loss import Teacher, head_loss
from specserve_bench.demo.head_model import (
    Head,
    begin_head,
    export_head,
    round_weights,
    shape_like,
)
from specserve_bench.demo.head_text import draft_vocabulary, held_out, marked, read_files
from specserve_bench.demo.train_head import default_aux_layer_ids
from specserve_bench.demo.training_config import HeadConfig
from specserve_kernels import cpu, reference
from tests.checkpoints import TEXT, save_quietly, tiny_checkpoint, tiny_tokenizer
from tests.models.eagle_heads import Run
from tests.models.formats import FORMATS, quantized

ROOT = Path(__file__).parents[2]
DEMO_HEAD = DEMO / f"{DEMO_TARGET.name}-head"
AUX_LAYER_IDS = (1, 2, 3)
CONFIG = {
    "tokens": 6 * 64,
    "step_tokens": 64,
    "length": 16,
    "long_length": 32,
    "draft_vocab_size": 200,
    "held_out": 0.1,
    "threads": 1,
}
TALK = [
    {"role": "user", "content": "what sat?"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "on what?"},
    {"role": "assistant", "content": "the mat"},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of a model that knows a text by heart."""
    folder = tiny_checkpoint(
        tmp_path_factory.mktemp("targets") / "toy", "llama", num_hidden_layers=4
    )
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(tiny_tokenizer()(TEXT * 6)["input_ids"])
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        rows = torch.stack([ids[n + step % 13 :][:161] for n in range(0, 80, 20)])
        loss = F.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    assert loss < 0.5
    save_quietly(model, folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    """Plain text and conversations."""
    (tmp_path / "some.txt").write_text(TEXT * 20)
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 30)
    return [str(tmp_path / name) for name in ("some.txt", "talk.jsonl")]


def command(folder, target, texts, **changes):
    """The words of a training whose config differs in these fields."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.json").write_text(json.dumps(CONFIG | changes))
    given = ["--target", str(target), "--text", *texts, "--config", str(folder / "mine.json")]
    return ["train-head", str(folder / "out"), *given, "--device", "cpu"]


def teacher_and_head(target):
    config = msgspec.convert(CONFIG | {"draft_vocab_size": 160}, HeadConfig)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    vocabulary = torch.arange(1, 2 * config.draft_vocab_size, 2)
    teacher = Teacher(model.eval().requires_grad_(False), AUX_LAYER_IDS, vocabulary)
    torch.manual_seed(0)
    head = Head(shape_like(load_config(target), AUX_LAYER_IDS, config))
    begin_head(head, model, vocabulary)
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    round_weights(head)
    return teacher, head


def test_the_head_of_the_files_is_the_trainers_over_three_draft_steps(target, tmp_path):
    """Logits and features; rows of a draft step see the target's features, then their own path."""
    teacher, head = teacher_and_head(target)
    export_head(tmp_path / "head", head, teacher.vocabulary)
    served = load_eagle_head(tmp_path / "head", load_decoder(target, "fp32", reference))
    assert torch.equal(served.target_ids(torch.arange(160)), teacher.vocabulary)
    ids = torch.tensor(tiny_tokenizer()(TEXT)["input_ids"])[:24]
    aux_hidden_states, _ = teacher.read(ids)
    with torch.no_grad():
        steps = head(aux_hidden_states[None, :-1], teacher.embed(ids[None, 1:]), 3)
        logits = [head.logits(rows)[0] for rows in steps]
    run, known = Run(served), 20
    got, hidden = run.step(served.fuse(aux_hidden_states[:known]), ids[1 : known + 1])
    close(got, logits[0][:known])
    for step in (1, 2):
        row = known - 1 + step
        got, hidden = run.step(hidden[-1:], ids[row + 1 : row + 2])
        close(got[0], logits[step][row])
        close(hidden[0], steps[step][0, row].detach())


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_loss_is_that_of_all_logits_at_once(target, monkeypatch):
    teacher, head = teacher_and_head(target)
    ids = torch.tensor(tiny_tokenizer()(TEXT)["input_ids"])[:48].view(2, 24)
    labels = ids.roll(-1, 1)
    labels[0, :9] = labels[1, 20:] = IGNORED
    aux_hidden_states, scores = (torch.stack(x) for x in zip(*map(teacher.read, ids), strict=True))
    wanted = scores.softmax(-1)[:, 1:, teacher.vocabulary]
    total, weights = 0, [1, 0.5, 0.25]
    counts = labels[:, 1:] != IGNORED
    counts[:, :2] = False  # the third draft step has features from the third row on
    for rows, weight in zip(
        head(aux_hidden_states[:, :-1], teacher.embed(ids[:, 1:]), 3), weights, strict=True
    ):
        entropy = -(wanted * head.logits(rows).log_softmax(-1)).sum(-1)
        total += entropy[counts].mean() * weight / sum(weights)
    total.backward()
    want = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    monkeypatch.setitem(losses.PART, "cpu", 7)
    loss = head_loss(head, teacher, 3, 0.5)
    assert loss(Batch(ids, labels)).item() == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close([p.grad for p in head.parameters()], want)
    head.zero_grad()
    assert loss(Batch(ids, torch.full_like(ids, IGNORED))) == 0 and head.fc.weight.grad is None


def test_a_head_learns_what_the_target_says_and_its_card_reports_how_well(target, texts, tmp_path):
    words = command(
        tmp_path, target, texts, tokens=60 * 640, step_tokens=640, length=160, long_length=160
    )
    assert commands.main(words) == 0
    folder = tmp_path / "out" / "toy-head"
    card = read_head_card(folder)
    assert card.figures.keys() == {"text", "conversations"}
    first, *later = card.figures["text"].right  # by chance 1 of 320
    assert first > 0.9 and min(later) > 0.3
    assert card.training.texts == ["some.txt", "talk.jsonl"] and card.training.target == "toy"
    assert card.config.tokens == 60 * 640
    assert (folder / "README.md").read_text() == head_words(card)
    served = load_eagle_head(folder, load_decoder(target, "bf16", reference))
    assert served.aux_layer_ids == AUX_LAYER_IDS


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(
    target, texts, tmp_path, monkeypatch
):
    assert commands.main(command(tmp_path / "whole", target, texts)) == 0
    monkeypatch.setattr(learning, "SAVE_SECONDS", 0.0)
    write = learning.log

    def stop(folder, step):
        write(folder, step)
        if step.step == 3:
            raise KeyboardInterrupt

    words = command(tmp_path / "stopped", target, texts)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(learning, "log", stop)
        commands.main(words)
    monkeypatch.setattr(train_head, "read_files", None)  # what is done is not done again
    assert commands.main(words) == 0
    files = [tmp_path / run / "out/toy-head/model.safetensors" for run in ("whole", "stopped")]
    assert files[0].read_bytes() == files[1].read_bytes()
    monkeypatch.setattr(train_head, "learn", None)
    assert commands.main(words) == 0
    others = command(tmp_path / "stopped", target, texts, tokens=9)
    with pytest.raises(
        ConfigError,
        match=reported_for(texts=tuple(texts), aux_layer_ids=AUX_LAYER_IDS, tokens=6 * 64),
    ):
        commands.main([*others, "--text", texts[0], "--aux-layers", "1,2"])


def reported_for(**fields):
    """The refusal of a folder that was begun with these."""
    values = ", ".join(f"{key} = {value!r}" for key, value in fields.items())
    return re.escape(f"training.json: begun by another config, with {values}; give that one")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--target", "/no/such/folder"], "no such folder"),
        (["--text", "missing.txt"], r"--text missing\.txt: .*No such file"),
        (["--text", "{tmp}/empty.txt"], r"empty\.txt: it is empty"),
        (["--text", "{tmp}/bytes.txt"], r"bytes\.txt: .*UTF-8"),
        (["--text", "{tmp}/short.txt"], "--text: 2 tokens of plain text .* a smaller length"),
        (["--text", "{tmp}/odd.jsonl"], r"odd\.jsonl, line 2: KeyError: 'messages'"),
        (["--text", "{tmp}/words.jsonl"], "line 1: ValueError: messages is no list of objects"),
        (["--text", "{tmp}/asked.jsonl"], "line 1: ValueError: no message is the assistant's"),
        (["--aux-layers", "1,4"], "--aux-layers 1,4: the target model has the layers 0 to 3"),
        (["--aux-layers", "2,1"], "--aux-layers 2,1: the layers must be ascending"),
        (["--aux-layers", "1,x"], "--aux-layers 1,x: the layers must be ascending"),
        (["--config", "{tmp}/wide.json"], "draft_vocab_size = 400, and .* vocab_size is 320"),
        (["--config", "{tmp}/odd.json"], r"--config .*odd\.json: .*`tokes`; .* step_tokens, .*"),
        (["--target", "{tmp}/foreign"], "its tokenizer has 300 tokens, .*vocab_size is 256"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_mistake_is_named_before_anything_is_computed(
    flags, told, target, texts, tmp_path, monkeypatch
):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "short.txt").write_text("cat")
    line = json.dumps({"messages": TALK})
    (tmp_path / "odd.jsonl").write_text(f'{line}\n{{"text": 1}}\n')
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": TALK[:1]}))
    (tmp_path / "words.jsonl").write_text('{"messages": "x"}')
    (tmp_path / "wide.json").write_text('{"draft_vocab_size": 400}')
    (tmp_path / "odd.json").write_text('{"tokes": 400}')
    tiny_checkpoint(tmp_path / "foreign", vocab_size=256)
    monkeypatch.setattr(train_head, "read_target", None)
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    if flags[0] == "--text":  # several would add up
        words = command(tmp_path, target, flags[1:])
    else:
        words = command(tmp_path, target, texts) + flags
    with pytest.raises(ConfigError, match=told) as raised:
        commands.main(words)
    assert "\n" not in str(raised.value) and not (tmp_path / "out").exists()


def test_a_target_that_no_head_is_for_is_named(texts, tmp_path):
    tiny_checkpoint(tmp_path / "olmo", "llama", model_type="olmo")
    quantized(tmp_path / "rounded", next(iter(FORMATS)))
    (tmp_path / "some.gguf").write_bytes(b"")
    for name, told in [
        ("olmo", "transformers computes it"),
        ("rounded", "quantized; take the model that it was made of"),
        ("some.gguf", "a file; take the folder"),
    ]:
        with pytest.raises(ConfigError, match=f"{name}: {told}"):
            commands.main(command(tmp_path, tmp_path / name, texts))


def test_a_target_of_others_needs_a_text(target, tmp_path):
    with pytest.raises(ConfigError, match="--target: its text is not known: name files with --te"):
        commands.main(["train-head", str(tmp_path), "--target", str(target)])


@pytest.mark.parametrize(
    ("num_layers", "aux_layer_ids"),
    [(1, (0,)), (2, (1,)), (3, (1, 2)), (4, (1, 2, 3)), (8, (2, 4, 5)), (36, (2, 18, 33))],
)
def test_default_aux_layer_ids_are_early_in_the_middle_and_late(num_layers, aux_layer_ids):
    assert default_aux_layer_ids(num_layers) == aux_layer_ids


def test_of_a_conversation_every_answer_is_learnt():
    parts = marked(TALK, tiny_tokenizer())
    assert "".join(text for text, _ in parts) == tiny_tokenizer().apply_chat_template(
        TALK, tokenize=False
    )
    assert [text for text, is_said in parts if is_said] == ["the cat<|end|>\n", "the mat<|end|>\n"]


def test_a_conversation_whose_template_rewrites_turns_is_learnt_whole():
    tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}"
    )
    assert [is_said for _, is_said in marked(TALK, tokenizer)] == [True]


def test_the_end_of_a_text_is_held_out(texts):
    corpus = read_files([Path(text) for text in texts], tiny_tokenizer())
    rest, beginnings = held_out(corpus, 0.1)
    kept = len(rest.source)
    assert 0.89 < kept / len(corpus.source) < 0.91 and len(rest.starts) - 1 == 27
    assert np.array_equal(beginnings["text"][0], corpus.source[kept : kept + 64])
    asked = {tiny_tokenizer().decode(ids) for ids in beginnings["conversations"]}
    assert (
        asked == {"user: what sat?<|end|>\nassistant: "} and len(beginnings["conversations"]) == 3
    )


def test_a_head_knows_the_most_frequent_tokens():
    ids = np.array([5, 5, 5, 2, 2, 9, 7], dtype=np.uint16)
    nothing = np.zeros(0, dtype=np.uint16)
    corpus = Corpus(ids, nothing, nothing.astype(bool), np.zeros(1, np.int64), "")
    assert draft_vocabulary(corpus, 10, 3).tolist() == [2, 5, 7]


def test_a_draft_counts_where_the_ones_before_it_were_right():
    texts = [[[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 0]], [[0], [1], [1]]]
    found = rightness([torch.tensor(hits, dtype=torch.bool) for hits in texts])
    assert (found.texts, found.chains, found.right) == (2, 5, [0.6, 0.6667, 0.5])
    assert found.acceptance_length == pytest.approx(1 + 0.6 + 0.4 + 0.2, abs=1e-3)


def test_the_demos_head_fits_its_target_and_its_card_says_what_it_is():
    card = read_head_card(DEMO_HEAD)
    assert (DEMO_HEAD / "README.md").read_text() == head_words(card)
    assert card.training.target == DEMO_TARGET.name
    assert card.training.aux_layer_ids == list(AUX_LAYER_IDS)
    assert card.figures.keys() == {"files", "questions"}
    assert min(figures.right[0] for figures in card.figures.values()) > 0.3  # a floor
    served = load_eagle_head(DEMO_HEAD, load_decoder(DEMO_TARGET, "bf16", cpu))
    assert served.aux_layer_ids == AUX_LAYER_IDS and served.config.num_layers == 1
    assert len(served.weights.targets) == card.config.draft_vocab_size == 4096
    assert sum(file.stat().st_size for file in DEMO_HEAD.iterdir()) < 12e6


@pytest.mark.slow
def test_the_figures_of_the_demos_head_are_measured_again():
    card, tensors = read_head_card(DEMO_HEAD), load_file(DEMO_HEAD / "model.safetensors")
    vocabulary = tensors.pop("d2t") + torch.arange(4096)
    assert torch.equal(tensors.pop("t2d").nonzero()[:, 0], vocabulary)
    shape = load_config(DEMO_TARGET)
    head = Head(shape_like(shape, AUX_LAYER_IDS, card.config))
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    target = train_head.read_target(DEMO_TARGET, torch.device("cpu"))
    texts = train_head.evaluation(train_head.read_tokenizer(DEMO_TARGET, shape), card.config)
    figures = measure(head, Teacher(target, AUX_LAYER_IDS, vocabulary), texts, 3)
    for kind, told in card.figures.items():
        assert figures[kind].right == pytest.approx(told.right, abs=0.02)


def test_the_command_is_registered():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    registered = project["entry-points"]["specserve.commands"]["demo"]
    assert registered == f"{commands.__name__}:main"
