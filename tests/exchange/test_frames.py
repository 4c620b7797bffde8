"""Frames between two processes, however their bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.exchange.messages import HEADER, MAX_BYTES, VERSION, Frames, pack


@given(st.lists(st.binary(max_size=50), max_size=5), st.lists(st.integers(0, 300)))
def test_however_bytes_are_split_the_same_frames_come_out(messages, cuts):
    data = b"".join(map(pack, messages))
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    frames = Frames()
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert [frame for piece in pieces for frame in frames.feed(piece)] == messages


def test_a_frame_of_another_version_is_no_frame():
    with pytest.raises(RuntimeError, match=f"version {VERSION + 1}"):
        list(Frames().feed(HEADER.pack(VERSION + 1, 0)))


def test_a_frame_is_refused_by_the_length_it_announces():
    with pytest.raises(RuntimeError, match="bytes"):
        list(Frames().feed(HEADER.pack(VERSION, MAX_BYTES + 1)))
    assert list(Frames().feed(HEADER.pack(VERSION, MAX_BYTES))) == []


def test_frames_before_a_bad_one_still_come_out():
    frames = Frames().feed(pack(b"one") + HEADER.pack(VERSION + 1, 0))
    assert next(frames) == b"one"
    with pytest.raises(RuntimeError):
        next(frames)
