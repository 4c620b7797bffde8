"""The training of the demo pair, on a config that takes seconds."""

import platform
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.nn import functional as F

from specserve import LLM, SamplingParams
from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.errors import ConfigError
from specserve_bench.demo import learning, losses, models, own_text, train
from specserve_bench.demo.batches import IGNORED, Batch, batch, encode, load_corpus, save_corpus
from specserve_bench.demo.card import read_card
from specserve_bench.demo.corpus import Turn
from specserve_bench.demo.tokenizer import train_tokenizer
from specserve_bench.demo.training_config import (
    OWN_LENGTH,
    Size,
    TrainingConfig,
    check_config,
    read_config,
)

NAMES = DEMO_TARGET.name, DEMO_DRAFT.name
SIZE = Size(1, 64, 1, 64)
CPU = torch.device("cpu")
CONFIG = TrainingConfig(
    vocab_size=400,
    target=SIZE,
    draft=SIZE,
    target_tokens=6 * 64,
    own_tokens=4 * OWN_LENGTH,
    draft_tokens=4 * 64,
    step_tokens=64,
    length=32,
    long_length=64,
    ask_every=1000,
    max_files=3,
    max_symbols=5,
)
TURNS = [Turn("What is it?", "A cat."), Turn("What does it?", "It sits on the mat.")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat\n"] * 3, 300)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return encode(tokenizer, ["the cat sat on the mat " * 9, "the mat " * 40], TURNS)


def test_a_batch_depends_on_the_seed_and_the_step_only(tokens):
    same, again, other = (batch(tokens, 7, step, 4, 16, 0.5) for step in (3, 3, 4))
    assert all(map(np.array_equal, same, again))
    assert not np.array_equal(same.token_ids, other.token_ids)


def test_source_is_learnt_token_by_token(tokens):
    ids, labels = batch(tokens, 0, 0, 3, 16, talk_share=0.0)
    assert ids[:, 1:].tolist() == labels[:, :-1].tolist()


def test_of_a_conversation_only_the_answer_is_learnt(tokens, tokenizer):
    ids, labels = batch(tokens, 0, 0, 3, 200, talk_share=1.0)
    learnt = tokenizer.decode(labels[labels != IGNORED])
    assert set(learnt.split(tokenizer.eos_token)[1:-1]) == {turn.answer for turn in TURNS}
    before = labels[:, :-1]
    assert torch.equal(ids[:, 1:][before != IGNORED], before[before != IGNORED])


def test_a_row_of_conversations_is_a_drawing_of_its_own_of_whole_ones(tokens):
    whole = [tokens.talk[a:b].tolist() for a, b in pairwise(tokens.starts)]
    ids, _ = batch(tokens, 0, 0, 8, 200, talk_share=1.0)
    rows = ids.tolist()
    assert len(set(map(tuple, rows))) > 1
    for row in rows:
        while row:
            one = next(w for w in whole if row[: len(w)] == w[: len(row)])
            row = row[len(one) :]


def test_the_rate_rises_stays_and_falls():
    rates = [learning.rate(step, 1000) for step in range(1000)]
    assert rates[0] == 0.05 and rates[19:600] == [1.0] * 581
    assert rates[600:] == sorted(rates[600:], reverse=True) and rates[-1] < 0.011


def test_a_line_of_the_log_is_the_mean_of_its_steps(monkeypatch):
    monkeypatch.setattr(learning, "monotonic", lambda: 50.0)
    line = learning.summary(7, [torch.tensor(1.0), torch.tensor(3.0)], started_at=44.0)
    assert line == learning.Step(7, 2.0, 3.0)


@pytest.fixture
def pair(tokenizer):
    return [models.build(SIZE, replace(CONFIG, seed=seed), tokenizer) for seed in range(2)]


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["next token", "distillation"])
def test_a_loss_by_parts_is_that_of_all_logits_at_once(kind, pair, tokens, monkeypatch):
    draft, target = pair
    drawn = batch(tokens, 0, 0, 3, 32, talk_share=0.5)
    marked = drawn.labels != IGNORED
    logits = draft(drawn.token_ids).logits[marked]
    if kind == "distillation":
        want = target(drawn.token_ids).logits[marked].log_softmax(-1).detach()
        all_at_once = (want.exp() * (want - logits.log_softmax(-1))).sum(-1).mean()
        loss = losses.distillation_loss(draft, target)
    else:
        all_at_once = F.cross_entropy(logits, drawn.labels[marked])
        loss = losses.next_token_loss(draft)
    all_at_once.backward()
    wanted = gradients(draft)
    draft.zero_grad()
    monkeypatch.setitem(losses.PART, "cpu", 7)
    assert marked.sum() % 7
    assert loss(drawn).item() == pytest.approx(all_at_once.item(), rel=1e-5)
    torch.testing.assert_close(gradients(draft), wanted)


def test_every_parameter_is_learnt_once_at_the_rate_and_decay_of_its_stage(pair, tmp_path):
    model = pair[0]
    optimizers = learning.build_optimizers(model, learning.Stage(tmp_path, 1, 0.5, 1e-3, 0.4))
    learning.set_rate(optimizers, 5e-4)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(5e-4, 0.4)}
    learnt = [id(p) for group in groups for p in group["params"]]
    assert sorted(learnt) == sorted(map(id, model.parameters()))


def test_a_batch_without_a_label_adds_no_gradients(pair):
    nothing = Batch(torch.zeros(1, 8, dtype=torch.int64), torch.full((1, 8), IGNORED))
    for loss in (losses.next_token_loss(pair[0]), losses.distillation_loss(*pair)):
        assert loss(nothing).item() == 0 and pair[0].lm_head.weight.grad is None


def test_a_draft_begins_with_the_likenesses_of_the_targets_words(pair):
    draft, target = (model.get_input_embeddings().weight for model in pair)
    models.begin_as(*pair)
    torch.testing.assert_close(draft @ draft.T, target @ target.T)


def weights(out):
    return [(out / name / "model.safetensors").read_bytes() for name in NAMES]


def test_a_training_is_not_continued_with_another_config(tmp_path):
    check_config(tmp_path / "new" / "training.json", CONFIG)
    check_config(tmp_path / "new" / "training.json", CONFIG)
    with pytest.raises(ConfigError, match=r"training\.json: begun by another config"):
        check_config(tmp_path / "new" / "training.json", TrainingConfig())
    (tmp_path / "new" / "training.json").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"training\.json.*another folder"):
        check_config(tmp_path / "new" / "training.json", CONFIG)
    with pytest.raises(ConfigError, match=r"cannot be written \(File exists\)\. Name another"):
        check_config(tmp_path / "new" / "training.json" / "training.json", CONFIG)


@pytest.mark.parametrize(
    "text",
    [
        *('{"sed": 3}', '{"seed": "3"}', "[]", "{", '{"seed": -1}', '{"own_tokens": 0}'),
        *('{"ask_every": 0}', '{"step_tokens": 64}', '{"vocab_size": 10}', '{"peak_rate": -1}'),
    ],
)
def test_a_config_with_a_mistake_is_named(tmp_path, text):
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--config .*mine\.json"):
        read_config(tmp_path / "mine.json", TrainingConfig)


def test_every_other_row_is_continued_greedily_and_the_rest_at_temperature_1(pair):
    target = pair[0].eval()
    target.get_input_embeddings().weight.data *= 6  # so that some words are likelier than others
    prompts = torch.randint(300, (400, 5), generator=torch.Generator().manual_seed(0))
    prompts[1::2] = prompts[1]
    more = own_text.continued(target, prompts, torch.Generator().manual_seed(0))
    assert more.shape == (400, OWN_LENGTH)
    with torch.no_grad():
        text = torch.cat([prompts, more], 1)
        words = target(text).logits[:, 4:-1].argmax(-1)
        law = target(prompts[1:2]).logits[0, -1].softmax(-1)
    assert (words[::2] == more[::2]).float().mean() > 0.99  # rounding differs with a cache
    said = torch.bincount(more[1::2, 0], minlength=len(law)) / 200
    assert 0.05 < law.max() < 0.8
    torch.testing.assert_close(said, law, atol=0.1, rtol=0)


def test_own_text_is_beginnings_of_source_in_turn_with_their_continuations(
    pair, tokens, monkeypatch
):
    monkeypatch.setitem(own_text.ROWS, "cpu", 2)
    source = np.arange(3 * own_text.BEGINNING, dtype=np.uint16) % 300
    asked = replace(CONFIG, own_tokens=4 * OWN_LENGTH)
    ids = own_text.continue_source(pair[0].eval(), asked, tokens._replace(source=source))
    lengths = [54] * 2 + [107] * 2  # evenly spaced
    assert len(ids) == 4 * OWN_LENGTH + sum(lengths)
    for length in lengths:
        assert set(np.diff(ids[:length].astype(int))) <= {1, -299}
        ids = ids[length + OWN_LENGTH :]


def test_a_corpus_is_read_as_it_was_saved(tmp_path, tokens):
    file = tmp_path / "corpus.npz"
    save_corpus(file, tokens._replace(python="3.9.0"))
    again = load_corpus(file)
    assert again.python == "3.9.0"
    for column, want in zip(again[:4], tokens[:4], strict=True):
        assert column.dtype == want.dtype and np.array_equal(column, want)


@pytest.mark.slow
def test_a_training_takes_the_corpus_that_is_in_its_folder(tmp_path, monkeypatch):
    first = train.prepare(tmp_path, CONFIG)
    monkeypatch.setattr(train, "read_corpus", None)
    tokenizer, corpus = train.prepare(tmp_path, CONFIG)
    assert tokenizer.get_vocab() == first[0].get_vocab() and len(tokenizer) == CONFIG.vocab_size
    assert all(map(np.array_equal, corpus, first[1]))


def test_norms_and_a_model_are_those_of_transformers(tmp_path, pair, tokenizer, tokens):
    model = pair[0]
    for p in model.parameters():
        p.data = (p * (torch.rand(p.shape) + 0.5)).detach().bfloat16().float()
    models.export(tmp_path / "model", model, tokenizer)
    read = models.read(tmp_path / "model")
    assert not any(isinstance(m, models.Norm) for m in read.modules())
    ids = batch(tokens, 0, 0, 3, 16, 0.5).token_ids
    torch.testing.assert_close(model(ids).logits, read.float()(ids).logits)


def test_a_gpu_that_is_not_there_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert train.device_named("auto").type == "cpu"
    with pytest.raises(ConfigError, match="--device cuda"):
        train.device_named("cuda")


@pytest.mark.slow
def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(
    tmp_path, monkeypatch, one_thread
):
    torch.set_num_threads(2)
    train.train(tmp_path / "whole", CONFIG, CPU)
    torch.set_num_threads(1)  # the process that continues may begin with any number
    monkeypatch.setattr(learning, "SAVE_SECONDS", 0.0)
    write = learning.log
    stops = [("target", 4), ("draft", 2)]

    def stop(folder, step):
        write(folder, step)
        if stops and (folder.name, step.step) == stops[0]:
            del stops[0]
            raise KeyboardInterrupt

    monkeypatch.setattr(learning, "log", stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train.train(tmp_path / "stopped", CONFIG, CPU)
    assert not stops
    # What is done is not done again.
    monkeypatch.setattr(train, "train_target", None)
    monkeypatch.setattr(own_text, "continue_source", None)
    told = train.train(tmp_path / "stopped", CONFIG, CPU)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    monkeypatch.setattr(train, "train_draft", None)
    assert train.train(tmp_path / "stopped", CONFIG, CPU) == told


@pytest.mark.slow
def test_the_pair_is_served_as_any_other(tmp_path):
    config = tmp_path / "mine.json"
    config.write_bytes(msgspec.json.encode(CONFIG))
    command = [str(tmp_path / "pair"), "--config", str(config), "--device", "cpu"]
    assert train.main([*command, "--no-card"]) == 0
    assert not (tmp_path / "pair" / "card.json").exists()
    assert train.main(command) == 0
    target, draft = (tmp_path / "pair" / name for name in NAMES)
    settings = {"memory.kv_bytes": 1 << 26, "model.threads": 1}
    with LLM(target, draft, set=settings, progress=False) as llm:
        (output,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=9))
    assert output.usage.completion_tokens > 0
    card = read_card(tmp_path / "pair")
    assert card.config == msgspec.to_builtins(CONFIG) and card.figures.questions == 3
    assert card.training["tokens"] == {"target": 384, "draft": 256}
    assert card.training["python"] == platform.python_version()
    text = (tmp_path / "pair" / "README.md").read_text()
    assert f"{card.figures.held_out_loss:.2f}" in text and "PSF" in text
