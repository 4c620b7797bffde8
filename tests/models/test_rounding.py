"""Checkpoints whose weights are rounded to codes as they are loaded."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.errors import ConfigError
from specserve.models.loader import is_same, load_decoder, weight_bytes
from specserve.models.weight import AS_STORED, Rounding
from specserve.models.weight_forms import MapForm, WeightForms
from specserve_kernels import Codes, cpu, reference
from tests.checkpoints import tiny_checkpoint
from tests.models.formats import WEIGHTS, quantized
from tests.models.forward import logits, prompt
from tests.models.gguf_files import write
from tests.models.test_quantized import vocabulary

W4, W8 = Rounding.named("w4", "w8"), Rounding.named("w8", "w8")
W8A8, LAYERS_ONLY = Rounding.named("w8a8", "w8"), Rounding.named("w4", "none")
EMBEDDING_TOO = Rounding.named("w4", "w8", "w8")


def load(folder, rounding=AS_STORED, ops=reference, dtype="fp32"):
    return load_decoder(folder, dtype, ops, rounding=rounding)


def rounded(folder, target, rounding):
    """A checkpoint of the values that the codes mean."""
    tensors = load_file(tiny_checkpoint(target) / WEIGHTS)
    for name, weight in load_file(folder / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if weight.dim() == 2:
            bits = rounding.bits(module, weight.shape[1])
            weight = reference.quantize(weight, bits).widen(torch.float32) if bits else weight
        tensors[name] = weight
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("rounding", [W4, W8, LAYERS_ONLY, EMBEDDING_TOO], ids=str)
def test_logits_are_those_of_the_rounded_weights(tmp_path, rounding, ops):
    folder = tiny_checkpoint(tmp_path / "model", seed=3)
    ids = prompt(320, 37)
    want = logits(load(rounded(folder, tmp_path / "rounded", rounding)), ids)
    torch.testing.assert_close(logits(load(folder, rounding, ops), ids), want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(load(folder), ids), want, rtol=1e-2, atol=1e-2)


def test_the_stored_numbers_are_rounded_whatever_the_dtype(tmp_path):
    """Not what bfloat16 leaves of them."""
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    fp32, bf16 = (load(folder, W4, dtype=dtype).weights for dtype in ("fp32", "bf16"))
    assert torch.equal(fp32.head.q, bf16.head.q)
    assert torch.equal(fp32.layers[0].qkv.q, bf16.layers[0].qkv.q)


def test_a_tied_head_is_rounded_and_the_table_is_not(tmp_path):
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    weights, table = load(folder, W8).weights, load(folder).weights.embedding
    assert torch.equal(weights.embedding, table)
    assert torch.equal(weights.head.q, reference.quantize(table, 8).q)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_embedding_of_codes_has_those_of_the_stored_numbers(tmp_path, dtype):
    folder = tiny_checkpoint(tmp_path)
    want, ids = reference.quantize(load(folder).weights.embedding, 8), torch.arange(320)
    for ops in (reference, cpu):
        decoder = load(folder, EMBEDDING_TOO, ops, dtype)
        assert torch.equal(decoder.weights.embedding.q, want.q)
        assert torch.equal(decoder.embed(ids), want.widen(decoder.dtype))


def test_a_tied_head_is_made_of_the_embeddings_codes_where_it_has_as_many_bits(tmp_path):
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    for head in ("none", "w8", "w4"):
        weights = load(folder, Rounding.named("w8a8", head, "w8")).weights
        assert weights.embedding.bits == 8 and not weights.embedding.rounds_rows
        assert (weights.head is weights.embedding) == (head == "w8")
    of_embedding, read = (load(folder, r, cpu).weights.head for r in (EMBEDDING_TOO, W4))
    assert torch.equal(of_embedding.words, read.words)


FORMS = {  # -> maps as (bits, group, how many, bits of activations), of two layers; the head's bits
    "as stored": (AS_STORED, {}, [(32, None, 8)], 32),
    "w8": (W8, {}, [(8, None, 8)], 8),
    "w8a8": (W8A8, {}, [(8, None, 8, 8)], 8),
    "w8a8, layers alone": (Rounding(8, None, True), {}, [(8, None, 8, 8)], 32),
    # 64 wide, so that a group is a row; but for those that are 128 wide
    "w4": (W4, {}, [(4, None, 6), (4, 64, 2)], 8),
    "layers alone": (LAYERS_ONLY, {}, [(4, None, 6), (4, 64, 2)], 32),
    "all in 4 bits": (Rounding(4, 4), {}, [(4, None, 6), (4, 64, 2)], 4),
    "a width without whole groups": (
        W4,
        {"intermediate_size": 96},
        [(4, None, 6), (8, None, 2)],
        8,
    ),
    "tied": (W8, {"tie_word_embeddings": True}, [(8, None, 8)], 8),
    "the embedding too": (EMBEDDING_TOO, {}, [(4, None, 6), (4, 64, 2)], 8),
    "the embedding too, w8a8": (Rounding.named("w8a8", "w8", "w8"), {}, [(8, None, 8, 8)], 8),
}


@pytest.mark.parametrize(("rounding", "sizes", "maps", "head"), FORMS.values(), ids=FORMS)
def test_forms_and_bytes_are_known_before_and_after(tmp_path, rounding, sizes, maps, head):
    folder = tiny_checkpoint(tmp_path, **sizes)
    forms = load(folder, rounding).weights.forms
    assert forms.maps == (*(MapForm(*form) for form in maps), MapForm(head, None, 1, is_head=True))
    assert forms.num_odd == (2 if "intermediate_size" in sizes else 0)
    assert forms.embedding_bits == rounding.embedding
    assert forms.num_bytes == weight_bytes(folder, "fp32", reference, rounding)


TIED = {"as stored": AS_STORED, "rounded": Rounding.named("w8", "w8", "w8")}


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("rounding", TIED.values(), ids=TIED)
def test_the_copy_of_a_tied_head_is_counted_before_loading(tmp_path, rounding, ops):
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    weights = load(folder, rounding, ops).weights
    assert weights.forms.num_bytes == weight_bytes(folder, "fp32", ops, rounding)


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0"])
def test_the_copy_of_a_tied_head_of_a_gguf_file_is_counted_before_loading(tmp_path, type):
    file, _ = write(tmp_path, type=type, tie_word_embeddings=True)
    loaded = load(file, ops=cpu).weights.forms.num_bytes
    assert weight_bytes(file, "fp32", cpu) == pytest.approx(loaded, rel=0.05)


def test_a_tied_head_on_a_gpu_is_no_copy():
    coded = pytest.importorskip("specserve_kernels.cuda.coded")
    table = torch.ones(4, 8)
    assert is_same(coded.PlainMap(table), table)
    assert not is_same(coded.PlainMap(table.clone()), table)


def test_forms_in_words():
    maps = (
        MapForm(4, 64, 2),
        MapForm(4, 32, 5, has_offsets=True),
        MapForm(8, None, 1),
        MapForm(8, None, 3, activation_bits=8),
        MapForm(16, None, 1, is_head=True),
    )
    assert WeightForms(maps, 3 << 20, 1, 8).words == (
        "3 MiB: 4 bits in groups of 64 (2 linear layers); "
        "4 bits in groups of 32 with offsets (5 linear layers); "
        "8 bits in rows (1 linear layer); "
        "8 bits in rows, activations in 8 bits (3 linear layers); 16 bits (LM head); "
        "8 bits instead of 4 in 1 of these layers, because 64 does not divide their width; "
        "embedding in 8 bits"
    )


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_rounded_activations_change_logits_as_little_as_rounded_weights(tmp_path, ops):
    folder, ids = tiny_checkpoint(tmp_path, seed=3), prompt(320, 37)
    stored, w8, w8a8 = (logits(load(folder, r, ops), ids) for r in (AS_STORED, W8, W8A8))
    of_weights, of_rows = (w8 - stored).norm(), (w8a8 - w8).norm()
    assert 0.5 * of_weights < of_rows < 2 * of_weights


def test_where_ops_round_no_rows_none_are(tmp_path, monkeypatch):
    """As on a GPU."""
    folder = tiny_checkpoint(tmp_path)
    monkeypatch.setattr(reference, "rounds_rows", False)
    assert load(folder, W8A8).weights.forms == load(folder, W8).weights.forms


def test_wide_rows_whose_sums_could_be_too_large_are_not_rounded():
    down = "model.layers.0.mlp.down_proj"
    assert W8A8.rounds_rows(down, 1 << 16) and not W8A8.rounds_rows(down, (1 << 16) + 1)


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("compressed-w4a16", {(4, 128, None), (4, None, None), (32, None, None)}),
        ("compressed-w8a8", {(8, None, 8), (32, None, None)}),
        ("fp8-block", {(32, None, None)}),
    ],
)
def test_the_codes_of_a_quantized_checkpoint_are_kept(tmp_path, name, forms):
    folder = quantized(tmp_path, name)
    kept = load(folder).weights.forms
    assert {(form.bits, form.group, form.activation_bits) for form in kept.maps} == forms
    assert weight_bytes(folder, "fp32", reference) == pytest.approx(kept.num_bytes, rel=0.05)


def test_a_head_that_is_a_quantized_embedding_is_made_of_its_codes(tmp_path):
    edit = vocabulary("model.embed_tokens")
    weights = load(quantized(tmp_path, "compressed-w8a16", edit, tie_word_embeddings=True)).weights
    assert isinstance(weights.head, Codes) and weights.head is weights.embedding


def test_a_gguf_file_is_rounded_unless_it_is_quantized(tmp_path):
    plain, quantized = (write(tmp_path / name, type=name) for name in ("BF16", "Q8_0"))
    want = load(plain.plain, W4, dtype="bf16").weights.layers[1].down
    assert torch.equal(load(plain.file, W4).weights.layers[1].down.q, want.q)
    with pytest.raises(ConfigError, match=r"model\.gguf: the weights are quantized already"):
        load(quantized.file, W4)


def test_what_is_quantized_is_not_rounded(tmp_path):
    with pytest.raises(ConfigError, match="the weights are quantized already"):
        load(quantized(tmp_path, "compressed-w4a16"), W8)


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, bad):
    folder = tiny_checkpoint(tmp_path)
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float(bad)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1\.mlp\.down_proj\.weight has values that are not"):
        load(folder, W4)


def test_progress_ends_at_all(tmp_path):
    seen = []
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    report = lambda done, total: seen.append(done / total)  # noqa: E731
    load_decoder(folder, "bf16", reference, None, report, W4)
    assert seen == sorted(seen) and seen[-1] == 1


def asked(activations, layers=None, head="w8"):
    return Rounding.named(layers, head, activations=activations)


ACTIVATIONS = {  # -> maps as (bits, group, how many, bits of activations); the head's
    "w4": (asked("int8", "w4"), [(4, None, 6, 8), (4, 64, 2, 8)], (8, 8)),
    "w8": (asked("int8", "w8"), [(8, None, 8, 8)], (8, 8)),
    "w8a8": (asked("int8", "w8a8"), [(8, None, 8, 8)], (8, 8)),
    "a head of numbers": (asked("int8", "w8", "none"), [(8, None, 8, 8)], (32, None)),
    "auto": (asked("auto", "w4"), [(4, None, 6), (4, 64, 2)], (8, None)),
    "auto, w8a8": (asked("auto", "w8a8"), [(8, None, 8, 8)], (8, None)),
    "float": (asked("float", "w4"), [(4, None, 6), (4, 64, 2)], (8, None)),
}


@pytest.mark.parametrize(("rounding", "maps", "head"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations_are_as_asked(tmp_path, rounding, maps, head):
    folder = tiny_checkpoint(tmp_path)
    forms = load(folder, rounding).weights.forms
    of_head = MapForm(head[0], None, 1, activation_bits=head[1], is_head=True)
    assert forms.maps == (*(MapForm(*form) for form in maps), of_head)
    assert forms.num_bytes == weight_bytes(folder, "fp32", reference, rounding)


@pytest.mark.parametrize("name", ["compressed-w8a8", "compressed-w8a16"])
@pytest.mark.parametrize("given", ["auto", "int8", "float"])
def test_a_checkpoint_decides_only_if_no_setting_does(tmp_path, name, given):
    forms = load(quantized(tmp_path, name), asked(given)).weights.forms
    stored = name == "compressed-w8a8"
    assert (forms.num_rounding > 0) == {"int8": True, "float": False}.get(given, stored)


def test_8_bit_activations_need_codes(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"needs quantized weights\. Set model\.quantize"):
        load(folder, asked("int8"))


def test_8_bit_activations_are_refused_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "rounds_rows", False)
    folder = tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="not supported on a GPU"):
        load(folder, asked("int8", "w4"))
    assert not load(folder, asked("auto", "w4")).weights.forms.num_rounding


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_8_bit_activations_in_groups_change_logits_less_than_4_bit_weights(tmp_path, ops):
    folder, ids = tiny_checkpoint(tmp_path, seed=3), prompt(320, 37)
    plain, floats, integers = (
        logits(load(folder, rounding, ops), ids)
        for rounding in (AS_STORED, W4, asked("int8", "w4"))
    )
    of_weights, of_rows = (floats - plain).norm(), (integers - floats).norm()
    assert 0 < of_rows < 0.2 * of_weights


@pytest.mark.parametrize("embedding", ["none", "w8"])
def test_a_tied_heads_activations_are_as_asked(tmp_path, embedding):
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    rounding = Rounding.named("w4", "w8", embedding, "int8")
    weights = load(folder, rounding).weights
    assert weights.forms.maps[-1].activation_bits == 8
    assert embedding == "none" or not weights.embedding.rounds_rows
    assert weights.forms.num_bytes == weight_bytes(folder, "fp32", reference, rounding)
