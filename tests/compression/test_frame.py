"""Frames: what was packed comes out, and nothing else does."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.base import BLOCK
from dilocox.compression.buffer_layout import Geometry
from dilocox.compression.compressor import Part
from dilocox.compression.frame import (
    frame_bytes,
    frame_digest,
    pack_frame,
    unpack_frame,
)
from dilocox.compression.registry import CODECS
from dilocox.config.codec_spec import FRAME_HEADER_BYTES
from dilocox.errors import ExchangeError
from tests.support.patterns import single

N = 2 * BLOCK


def part(name: str, n: int = N) -> Part:
    return single(name, Geometry(((2, n // 2),), (0,), n)).part(0, n)


def frame_of(name: str = "int4", n: int = N) -> tuple[Tensor, Tensor]:
    payload = part(name, n).encode(torch.arange(n, dtype=torch.float32).sub_(100))
    return pack_frame(part(name, n), payload), payload


def rewritten(frame: Tensor, offset: int, form: str, value: object) -> bytes:
    data = bytearray(frame.numpy().tobytes())
    struct.pack_into(form, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize("name", [*CODECS, "topk:64", "top1:64", "cocktail"])
@pytest.mark.parametrize("n", [0, BLOCK, 65 * BLOCK])
def test_round_trip_and_size(name: str, n: int) -> None:
    frame, payload = frame_of(name, n)
    assert frame.shape == (frame_bytes(part(name, n)),)
    assert frame.numel() == 64 + payload.numel()
    for given_as in (frame, frame.numpy().tobytes(), memoryview(frame.numpy().tobytes())):
        assert torch.equal(unpack_frame(given_as, part(name, n)), payload)


def test_header_is_the_documented_one() -> None:
    frame, payload = frame_of()
    raw = frame.numpy().tobytes()
    assert raw[:4] == b"DLCX"
    assert struct.unpack_from("<HHQQ", raw, 4) == (2, part("int4").identifier, N, 132)
    assert raw[24:56] == hashlib.sha256(payload.numpy().tobytes()).digest()
    assert frame_digest(frame) == raw[24:56]
    assert raw[56:64] == bytes(8)
    topk, _ = frame_of("topk:64", 8192)
    assert struct.unpack_from("<II", topk.numpy().tobytes(), 56) == (64, 0)


@pytest.mark.parametrize(
    ("offset", "form", "value", "reason"),
    [
        (0, "4s", b"GIFx", "does not start"),
        (4, "<H", 1, "format version 1, this dilocox speaks 2"),
        (6, "<H", 4, r"codec number 4, expected 5 \(int4\)"),
        (8, "<Q", N + BLOCK, "384 values, expected 256"),
        (16, "<Q", 131, "header says 131"),
        (30, "B", 7, "digest"),
        (60, "B", 1, r"codec number 5 with 0 and 1, expected 0 and 0 \(int4\)"),
        (FRAME_HEADER_BYTES + 9, "B", 255, "digest"),
    ],
)
def test_each_difference_has_its_reason(offset: int, form: str, value: object, reason: str) -> None:
    frame, _ = frame_of()
    with pytest.raises(ExchangeError, match=reason):
        unpack_frame(rewritten(frame, offset, form, value), part("int4"))


def test_frames_of_other_codecs_and_lengths_are_refused() -> None:
    frame, payload = frame_of()
    with pytest.raises(ExchangeError, match="codec number 5, expected 4"):
        unpack_frame(frame, part("int8"))
    with pytest.raises(ExchangeError, match="256 values, expected 128"):
        unpack_frame(frame, part("int4", BLOCK))
    other, _ = frame_of("topk:64", 8192)
    with pytest.raises(ExchangeError, match=r"codec number 7 with 64 and 0, expected 78 and 0"):
        unpack_frame(other, part("topk:78", 8192))
    with pytest.raises(ExchangeError, match="not a flat uint8"):
        unpack_frame(frame.to(torch.int16), part("int4"))
    with pytest.raises(ExchangeError, match=r"must be uint8 \[260\]"):
        pack_frame(part("int8"), payload)


FUZZED = pytest.mark.parametrize(
    ("name", "n"),
    [("int4", N), ("int2", N), ("topk:64", 8192), ("top1:64", 8192), ("cocktail", 8192)],
)


@FUZZED
@given(draw=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_cut_frames_are_refused(name: str, n: int, draw: st.DataObject) -> None:
    frame, _ = frame_of(name, n)
    length = draw.draw(st.integers(0, frame.numel() - 1))
    for short in (frame[:length], frame.numpy().tobytes()[:length]):
        with pytest.raises(ExchangeError, match="refused"):
            unpack_frame(short, part(name, n))


@FUZZED
@given(extra=st.binary(min_size=1, max_size=80))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_longer_frames_are_refused(name: str, n: int, extra: bytes) -> None:
    frame, _ = frame_of(name, n)
    with pytest.raises(ExchangeError, match="cut or padded"):
        unpack_frame(frame.numpy().tobytes() + extra, part(name, n))


@FUZZED
@given(draw=st.data(), change=st.integers(1, 255))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_changed_byte_is_refused(name: str, n: int, draw: st.DataObject, change: int) -> None:
    frame, _ = frame_of(name, n)
    position = draw.draw(st.integers(0, frame.numel() - 1))
    frame[position] = frame[position] ^ change
    with pytest.raises(ExchangeError, match="frame refused"):
        unpack_frame(frame, part(name, n))


@FUZZED
@given(junk=st.binary(max_size=300))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_junk_is_refused(name: str, n: int, junk: bytes) -> None:
    with pytest.raises(ExchangeError, match="frame refused"):
        unpack_frame(junk, part(name, n))
