"""Text as it streams: whole characters only, and nothing of a stop string."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specserve.text.tokenizer import TextStream
from specserve.text.tokenizer import Tokenizer as TextTokenizer
from tests.checkpoints import EOS, PAD
from tests.checkpoints import tiny_tokenizer as made_by_transformers
from tests.text.test_tokenizer_parity import KINDS

UNFINISHED = "\ufffd"
# Characters of one to four bytes; what the tokenizer has no merge for comes byte by byte.
texts = st.text("the cat (read)\n\x00é€ßद한🙂👩‍🔬\u0301", max_size=30)
sizes = st.lists(st.integers(1, 7), min_size=1, max_size=40)


@cache
def tiny_tokenizer():
    return TextTokenizer(made_by_transformers().backend_tokenizer)


def encode(text):
    return tiny_tokenizer().encode(text) if text else []


def decode(ids):
    return tiny_tokenizer().decode(ids, skip_special_tokens=False)


def steps(ids, sizes):
    """The ids as steps bring them: some at a time."""
    while ids:
        size, *sizes = *sizes, 1
        yield ids[:size]
        ids = ids[size:]


def stream(ids, sizes=(), prompt=(), stop=(), **how):
    """(pieces, tokens that count, whether a stop ended it); `finish` comes last where none did."""
    text, pieces, count = TextStream(tiny_tokenizer(), prompt, stop, **how), [], 0
    for new in steps(ids, list(sizes)):
        piece = text.push(new)
        pieces.append(piece.text)
        count += piece.num_tokens
        if piece.stop is not None:
            return pieces, count, True
    return [*pieces, text.finish()[0]], count, False


@given(prompt=texts, text=texts, sizes=sizes)
def test_pieces_make_the_whole_text_in_whole_characters(prompt, text, sizes):
    pieces, count, is_stopped = stream(encode(text), sizes, encode(prompt))
    assert "".join(pieces) == text
    assert not any(UNFINISHED in piece for piece in pieces)
    assert (count, is_stopped) == (len(encode(text)), False)


@given(prompt=texts, text=texts, sizes=sizes)
def test_a_stop_that_never_comes_changes_nothing(prompt, text, sizes):
    pieces, count, is_stopped = stream(encode(text), sizes, encode(prompt), ["#", "the cat #"])
    assert "".join(pieces) == text
    assert (count, is_stopped) == (len(encode(text)), False)


@settings(max_examples=300)
@given(
    text=st.text("abcé", max_size=30),
    stop=st.lists(st.text("abcé", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=sizes,
)
def test_a_stop_cuts_the_text_before_it_and_the_tokens_after_it(text, stop, sizes):
    ids = encode(text)
    pieces, count, is_stopped = stream(ids, sizes, (), stop)
    shown = "".join(pieces)
    # The first prefix of the tokens that holds a stop; a half character's text is still to come.
    ends = [n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in stop)]
    if ends:
        whole = decode(ids[: ends[0]])
        assert shown == whole[: min(at for s in stop if (at := whole.find(s)) >= 0)]
        assert (count, is_stopped) == (ends[0], True)
    else:
        assert (shown, count, is_stopped) == (text, len(ids), False)


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 319), max_size=40), sizes=sizes)
def test_any_ids_stream_to_the_text_that_they_decode_to(ids, sizes):
    """A random model says bytes that are no characters; also ids that the tokenizer has not."""
    want = tiny_tokenizer().decode(ids)
    pieces, count, _ = stream(ids, sizes)
    assert ("".join(pieces), count) == (want, len(ids))


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 319), max_size=40), sizes=sizes)
def test_where_a_stop_cuts_does_not_depend_on_the_steps(ids, sizes):
    one, many = (stream(ids, s, (), ["a", UNFINISHED, "t "]) for s in ([99], sizes))
    assert ("".join(one[0]), *one[1:]) == ("".join(many[0]), *many[1:])


STOPS = {  # letters as they come, stops -> text, letters that count
    "in one token": ("xyENDz", ["END"], "xy", 5),
    "at the very beginning": ("ENDxy", ["END"], "", 3),
    "alone": ("END", ["END"], "", 3),
    "a single letter": ("abc", ["b"], "a", 2),
    "only begun": ("xyEN", ["END"], "xyEN", 4),
    "begun, then something else": ("xENxENDz", ["END"], "xENx", 7),
    "begun within itself": ("aabaabaac", ["aabaac"], "aab", 9),
    "the earliest of several": ("xbbaa", ["aa", "bb"], "x", 3),
    "the one complete first, not the one begun first": ("xabcd", ["abcd", "bc"], "xa", 4),
    "one inside the other, ending together": ("xabc", ["bc", "abc"], "x", 4),
    "one the beginning of the other": ("xabc", ["abc", "ab"], "x", 3),
    "a line's end": ("ab\ncd", ["\n"], "ab", 3),
}


@pytest.mark.parametrize("at_once", [True, False], ids=["one step", "a letter a step"])
@pytest.mark.parametrize(("letters", "stop", "text", "count"), STOPS.values(), ids=STOPS)
def test_a_stop_may_stand(letters, stop, text, count, at_once):
    ids = [encode(letter)[0] for letter in letters]
    pieces, num_tokens, is_stopped = stream(ids, [99] if at_once else [], (), stop)
    assert ("".join(pieces), num_tokens) == (text, count)
    assert is_stopped == any(s in letters for s in stop)


SPECIAL_STOPS = {  # tokens as they come, stops -> text, tokens that count, the stop
    "a token that the text leaves out": (["a", PAD, "b"], [PAD], "a", 2, PAD),
    "the first token": ([EOS, "b"], [EOS], "", 1, EOS),
    "behind text": (["a", ".", PAD, "b"], [f".{PAD}"], "a", 3, f".{PAD}"),
    "before text": (["a", PAD, "b", "c"], [f"{PAD}b"], "a", 3, f"{PAD}b"),
    "between text": (["x", "a", PAD, "b"], [f"a{PAD}b"], "x", 4, f"a{PAD}b"),
    "two of them": (["a", PAD, EOS], [PAD + EOS], "a", 3, PAD + EOS),
    "another one between": (["a", EOS, PAD], [f"a{PAD}"], "a", 3, None),
    "only begun": (["a", ".", EOS, "b"], [f".{PAD}"], "a.b", 4, None),
    "plain text across one": (["x", "a", PAD, "b"], ["ab"], "x", 4, "ab"),
    "the one that begins first": (["x", "a", PAD, "b"], [f"{PAD}b", "ab"], "x", 4, "ab"),
    "the one complete first": (["x", "a", PAD, "b"], [f"a{PAD}", "ab"], "x", 3, f"a{PAD}"),
    "letters that spell one": ([*PAD, "b"], [PAD], "", len(PAD), PAD),
}


def tokens_of(each):
    ids = tiny_tokenizer().get_vocab()
    return [ids[text] if text in (PAD, EOS) else encode(text)[0] for text in each]


@pytest.mark.parametrize("size", [1, 2, 99])
@pytest.mark.parametrize(
    ("each", "stop", "text", "count", "found"), SPECIAL_STOPS.values(), ids=SPECIAL_STOPS
)
def test_a_stop_string_may_contain_special_tokens(each, stop, text, count, found, size):
    ids = tokens_of(each)
    pieces, num_tokens, is_stopped = stream(ids, [size] * len(ids), (), stop)
    assert ("".join(pieces), num_tokens, is_stopped) == (text, count, found is not None)
    pieces, num_tokens, _ = stream(ids, [size] * len(ids), (), stop, keeps_stop=True)
    assert ("".join(pieces), num_tokens) == (text + (found or ""), count)


def test_min_tokens_holds_for_stop_strings_with_special_tokens():
    ids = tokens_of(["a", PAD, "b", PAD, "c"])
    for least, text in enumerate(["a", "a", "ab", "ab", "abc"]):
        assert "".join(stream(ids, [], (), [PAD], min_tokens=least)[0]) == text


def test_min_tokens_counts_shown_and_hidden_text_by_itself():
    ids = tokens_of([PAD, "a", "b", "c"])
    for least, want in ((2, ""), (3, "abc")):
        assert "".join(stream(ids, [], (), [f"{PAD}ax", "ab"], min_tokens=least)[0]) == want
    [end] = tokens_of([EOS])
    for least, want in ((2, ("a", f"b{EOS}")), (3, ("ab", None))):
        text = TextStream(tiny_tokenizer(), [], [f"b{EOS}"], min_tokens=least)
        shown = text.push(tokens_of(["a", "b"])).text
        rest, found = text.finish(end)
        assert (shown + rest, found) == want


def test_a_special_token_that_is_shown_ends_the_text_at_the_same_place():
    ids, kept = tokens_of(["a", PAD, "b", EOS]), tiny_tokenizer().keeping([PAD])
    for stream in (
        TextStream(tiny_tokenizer(), [], [f"b{EOS}"], skips_special=False),
        TextStream(kept, [], [f"b{EOS}"]),
    ):
        assert stream.push(ids)[:3] == (f"a{PAD}", 4, f"b{EOS}")


@pytest.mark.parametrize(
    ("stop", "want"),
    [
        ([EOS], ("ab", EOS)),
        ([f"b{EOS}"], ("a", f"b{EOS}")),
        ([PAD], ("ab", None)),
        (["b"], ("a", "b")),
    ],
)
def test_an_end_token_without_text_completes_a_stop_string(stop, want):
    [end] = tokens_of([EOS])
    for skips in (True, False):
        text = TextStream(tiny_tokenizer(), [], stop, skips_special=skips)
        piece = text.push(tokens_of(["a", "b"]))
        rest, found = text.finish(end) if piece.stop is None else ("", piece.stop)
        assert (piece.text + rest, found) == want


@settings(max_examples=200)
@given(
    each=st.lists(st.sampled_from(["a", "b", PAD, EOS]), max_size=12),
    stops=st.lists(
        st.lists(st.sampled_from(["a", "b", PAD, EOS]), min_size=1, max_size=3).map("".join),
        min_size=1,
        max_size=3,
    ),
    sizes=sizes,
)
def test_stop_strings_with_special_tokens_are_found_wherever_they_are(each, stops, sizes):
    special = [s for s in stops if "<" in s]

    def places(n):
        """Where stops begin in n tokens with special ones."""
        text = "".join(each[:n])
        shown = [i for i, t in enumerate(each[:n]) if len(t) == 1]
        starts = [sum(map(len, each[:i])) for i in shown]
        visible = "".join(each[i] for i in shown)
        found = [(text.find(s), len(s), s) for s in special]
        plain = [(visible.find(s), s) for s in stops if s not in special]
        return sorted(
            [f for f in found if f[0] >= 0]
            + [(starts[at], len(s), s) for at, s in plain if at >= 0]
        )

    n = next((n for n in range(1, len(each) + 1) if places(n)), None)
    pieces, count, is_stopped = stream(tokens_of(each), sizes, (), stops)
    cut = None if n is None else places(n)[0][0]
    want = "".join(each)[:cut].replace(PAD, "").replace(EOS, "")
    assert "".join(pieces) == want
    assert (count, is_stopped) == (n or len(each), n is not None)


KEPT = {  # letters as they come, stops -> text
    "alone": ("abc", ["b"], "ab"),
    "the earliest of several": ("xbbaa", ["aa", "bb"], "xbb"),
    "the one complete first": ("xabcd", ["abcd", "bc"], "xabc"),
    "one that is only begun": ("xyEN", ["END"], "xyEN"),
}


@pytest.mark.parametrize("at_once", [True, False], ids=["one step", "a letter a step"])
@pytest.mark.parametrize(("letters", "stop", "text"), KEPT.values(), ids=KEPT)
def test_a_stop_may_be_kept(letters, stop, text, at_once):
    ids = [encode(letter)[0] for letter in letters]
    pieces, _, _ = stream(ids, [99] if at_once else [], (), stop, keeps_stop=True)
    assert "".join(pieces) == text


EARLY = {  # letters as they come, stops, min_tokens -> text, letters that count
    "before a stop that counts": ("abxab", ["ab"], 2, "abx", 5),
    "in the middle of a stop": ("xab", ["ab"], 2, "x", 3),
    "at a stop's end": ("xabc", ["ab"], 3, "xabc", 4),
    "at a stop that begins a longer one": ("xabcz", ["ab", "abcd"], 3, "xabcz", 5),
    "inside a longer one": ("xabcd", ["ab", "abcd"], 3, "x", 5),
    "in a run of stops": ("aaaa", ["a"], 3, "aaa", 4),
    "where stops overlap": ("aaaa", ["aa"], 2, "a", 3),
    "after all": ("abab", ["ab"], 9, "abab", 4),
}


@pytest.mark.parametrize("at_once", [True, False], ids=["one step", "a letter a step"])
@pytest.mark.parametrize(("letters", "stop", "least", "text", "count"), EARLY.values(), ids=EARLY)
def test_min_tokens_may_end(letters, stop, least, text, count, at_once):
    ids = [encode(letter)[0] for letter in letters]
    how = {"stop": stop, "min_tokens": least}
    pieces, num_tokens, is_stopped = stream(ids, [99] if at_once else [], **how)
    assert ("".join(pieces), num_tokens) == (text, count)
    assert is_stopped == (text != letters)


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 319), max_size=40), sizes=sizes, least=st.integers(0, 40))
def test_where_an_early_stop_cuts_does_not_depend_on_the_steps_either(ids, sizes, least):
    how = {"stop": ["a", UNFINISHED, "t ", "te"], "min_tokens": least}
    one, many = (stream(ids, s, **how) for s in ([99], sizes))
    assert ("".join(one[0]), *one[1:]) == ("".join(many[0]), *many[1:])
    assert not one[2] or one[1] > least


def test_of_stops_that_begin_together_the_shortest_is_reported_and_kept():
    (token,) = encode("the")
    for stops in (["the", "th"], ["th", "the"]):
        text = TextStream(tiny_tokenizer(), [], stops, keeps_stop=True)
        assert text.push([token])[:3] == ("th", 1, "th")


@settings(max_examples=200)
@given(
    text=st.text("ab", max_size=30),
    stops=st.sets(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=40),
    least=st.integers(0, 12),
)
def test_among_many_stops_the_first_to_end_cuts_the_text(text, stops, least):
    got, kept = TextStream(tiny_tokenizer(), [], [*stops], min_tokens=least), ""
    found = None
    for letter in text:
        piece = got.push(encode(letter))
        kept += piece.text
        if (found := piece.stop) is not None:
            break
    ends = [n for n in range(least + 1, len(text) + 1) if text[:n].endswith(tuple(stops))]
    end = min(ends, default=None)
    want = max((s for s in stops if end and text[:end].endswith(s)), key=len, default=None)
    assert found == want
    assert kept + ("" if found else got.finish()[0]) == (text[: end - len(want)] if end else text)


def test_a_token_costs_little_next_to_thousands_of_stops():
    """Counted, not timed: each search looks once per length that occurs."""
    stops = [chr(0x400 + i) + "x" * (i % 3) for i in range(5000)]
    text = TextStream(tiny_tokenizer(), [], stops)
    assert text.held.plain.lengths == [1, 2, 3]
    assert text.push(encode("abc" * 50)).text == "abc" * 50


def test_special_tokens_are_written_out_where_they_are_not_skipped():
    end = tiny_tokenizer().get_vocab()[EOS]
    ids = [*encode("a"), end, end, *encode("b")]
    for skips, want in ((True, "ab"), (False, f"a{EOS}{EOS}b")):
        text = TextStream(tiny_tokenizer(), [end], skips_special=skips)
        assert text.push(ids).text == want


def test_what_may_be_the_beginning_of_a_stop_is_held_and_released():
    text = TextStream(tiny_tokenizer(), [], ["END", "ab!"])
    pieces = [text.push(encode(letter)).text for letter in "xENabEab"]
    assert pieces == ["x", "", "", "EN", "", "ab", "E", ""]
    assert text.finish()[0] == "ab"


def test_the_prompt_is_no_part_of_a_stop():
    pieces, _, is_stopped = stream(encode("D."), [], encode("EN"), ["END"])
    assert ("".join(pieces), is_stopped) == ("D.", False)


def test_a_token_that_completes_a_stop_and_goes_on_shows_none_of_it():
    text = TextStream(tiny_tokenizer(), [], ["th"])
    (token,) = encode("the")
    assert text.push([*encode("a"), token, token]) == ("a", 2, "th", [1, 1], [0, 1])


def test_each_token_ends_where_the_text_that_it_lets_out_does():
    text = TextStream(tiny_tokenizer(), [], ["ab!"])
    piece = text.push([*encode("x"), *encode("a"), *encode("b"), *encode("c")])
    assert (piece.text, piece.ends) == ("xabc", [1, 1, 1, 4])
    assert text.push(encode("🙂")).ends == [0, 0, 0, 1]


def test_each_token_starts_where_those_before_it_end_though_their_text_is_held_back():
    text = TextStream(tiny_tokenizer(), [], ["abd"])
    ids = [*encode("x"), *encode("a"), *encode("b"), *encode("c"), *encode("🙂"), *encode("y")]
    starts = [0, 1, 2, 3, 4, 4, 4, 4, 5]
    assert text.push(ids).starts == starts
    text = TextStream(tiny_tokenizer(), [], ["abd"])
    assert [text.push([token]).starts[0] for token in ids] == starts


def test_a_character_split_over_tokens_waits_for_its_last_byte():
    text = TextStream(tiny_tokenizer(), [])
    ids = encode("🙂")
    assert len(ids) == 4
    assert [text.push([i]).text for i in ids] == ["", "", "", "🙂"]


def test_a_character_never_finished_is_shown_at_the_end():
    text = TextStream(tiny_tokenizer(), [])
    assert text.push([*encode("a"), *encode("🙂")[:2]]).text == "a"
    assert text.finish()[0] == UNFINISHED


def test_a_stop_next_to_a_character_never_finished_is_none_the_less_cut():
    """A token may hold a whole letter and half a character, and be the last one."""

    class Pair:
        special_ids = skipped_ids = frozenset()

        def has_special(self, text):
            return False

        def whole_text(self, token):
            return ""

        def decode(self, ids, skip_special_tokens):
            return "".join(["a", "b" + UNFINISHED][i] for i in ids)

    for least, end in ((0, ("", "b")), (1, ("", "b")), (2, ("b" + UNFINISHED, None))):
        text = TextStream(Pair(), [], ["b"], min_tokens=least)
        assert text.push([0]).text == "a"
        assert text.push([1]).text == ""
        assert text.finish() == end


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character_hides_nothing_of_the_output(cut):
    ids = encode("🙂")
    said = [*ids[cut:], *encode("ok")]
    assert "".join(stream(said, [], ids[:cut])[0]) == decode(said)


def test_a_space_that_a_tokens_neighbour_decides_on_is_kept():
    """A sentencepiece decoder drops the space that a text begins with."""
    words = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, unk_token="s"))
    words.decoder = decoders.Metaspace()
    text = TextStream(TextTokenizer(words), [0])
    assert [text.push([i]).text for i in (1, 2, 0)] == [" cat", "s", " the"]
    at_the_start = TextStream(text.tokenizer, [])
    assert [at_the_start.push([i]).text for i in (0, 1, 2)] == ["the", " cat", "s"]


def test_ids_without_text_add_none_and_hold_nothing_up():
    text = TextStream(tiny_tokenizer(), encode("x"))
    end = tiny_tokenizer().get_vocab()[EOS]
    ids = [*encode("a"), 310, end, *encode("b"), 319]
    assert [text.push([i]).text for i in ids] == ["a", "", "", "b", ""]


def test_ids_without_text_inside_a_stop_do_not_hide_it():
    ids = [*encode("E"), 310, *encode("N"), 311, *encode("D"), *encode("x")]
    assert stream(ids, [], (), ["END"]) == ([""] * 5, 5, True)


def test_nothing_said_is_no_text():
    text = TextStream(tiny_tokenizer(), encode("x"), ["a"])
    assert text.push([]) == ("", 0, None, [], [])
    assert text.finish()[0] == ""


def byte_fallback_tokenizer():
    """As Llama 2's: a run of byte tokens is valid, or not, as a whole."""
    vocab = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}, "a": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return TextTokenizer(tokenizer)


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), byte_fallback_tokenizer()])
@given(st.lists(st.integers(1, 256), max_size=60), st.data())
def test_the_text_does_not_depend_on_how_many_tokens_come_at_once(tokenizer, ids, data):
    ids = ids + [b + 1 for b in "🎉🎉é🎉".encode()] * data.draw(st.booleans())
    one, many = TextStream(tokenizer, []), TextStream(tokenizer, [])
    want = "".join(one.push([i]).text for i in ids) + one.finish()[0]
    got = ""
    while ids:
        size = data.draw(st.integers(1, 9))
        got, ids = got + many.push(ids[:size]).text, ids[size:]
    assert got + many.finish()[0] == want


WORDS = [
    "the",
    "cat",
    "sat",
    "mat",
    "unreadable",
    "reader",
    "don't",
    "é",
    "한국",
    ".",
    ",",
    "x" * 9,
]


def trained(tokenizer, trainer, decoder):
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.decoder = decoder
    return TextTokenizer(tokenizer)


def sentence_piece():
    """As SentencePiece's unigrams: a word carries the space before it, but not the first."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"])
    return trained(tokenizer, trainer, decoders.Metaspace())


def word_piece():
    """As BERT's: a piece inside a word is marked, and what is not marked gets a space before it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"])
    return trained(tokenizer, trainer, decoders.WordPiece())


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), sentence_piece(), word_piece()])
@given(st.lists(st.sampled_from(WORDS), max_size=12), st.integers(0, 9), sizes)
def test_a_stream_says_what_decoding_the_whole_says(tokenizer, words, num_prompt, sizes):
    ids = tokenizer.encode(" ".join(words)) if words else []
    prompt = tokenizer.decode(ids[:num_prompt])
    if UNFINISHED in prompt:
        prompt, ids = "", ids[num_prompt:]
        num_prompt = 0
    stream = TextStream(tokenizer, ids[:num_prompt])
    said = "".join(stream.push(new).text for new in steps(ids[num_prompt:], sizes))
    assert prompt + said + stream.finish()[0] == tokenizer.decode(ids)


def test_runs_of_byte_tokens_are_read_character_by_character():
    text = TextStream(byte_fallback_tokenizer(), [])
    assert text.push([b + 1 for b in ("🎉" * 8).encode()]).text == "🎉" * 8


def test_bytes_that_never_make_a_character_are_not_held_for_ever():
    text = TextStream(tiny_tokenizer(), [])
    start = encode("🙂")[0]
    assert len("".join(text.push([start]).text for _ in range(100))) > 60


class Decoding(TextTokenizer):
    """Knows no token's text by itself: all text is decoded beside the text before it."""

    def whole_text(self, token):
        return ""


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_text_known_by_token_is_what_decoding_says(make):
    backend = make()
    known, decoding = TextTokenizer(backend), Decoding(backend)
    num_tokens = backend.get_vocab_size()
    ids = st.lists(st.integers(0, num_tokens), max_size=40)  # the last one has no token
    stops = st.lists(st.sampled_from(["t", "he ", "\ufffd", "é"]), max_size=2)

    @settings(max_examples=60)
    @given(ids, ids, sizes, stops, st.booleans(), st.sampled_from([None, [], ["<s>"]]))
    def check(prompt, output, sizes, stops, skips, kept):
        streams = [
            TextStream(t.keeping(kept), prompt, stops, skips_special=skips)
            for t in (known, decoding)
        ]
        for new in steps(output, sizes):
            one, other = (each.push(new) for each in streams)
            assert one == other
        assert streams[0].finish() == streams[1].finish()

    check()
    knows = [token for token in range(num_tokens) if known.whole_text(token)]
    assert bool(knows) == (known.decoders == {"ByteLevel"})
