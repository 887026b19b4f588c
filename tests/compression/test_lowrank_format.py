"""Low rank on the wire: exact sizes, exact sums, the same bytes everywhere, and refusals."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.base import BLOCK
from dilocox.compression.frame import pack_frame, payload_digest, unpack_frame
from dilocox.compression.lowrank.codec import LowRank
from dilocox.compression.lowrank.layout import Stack, pays
from dilocox.compression.lowrank.quantised_factors import (
    basis_bytes,
    decode_basis,
    encode_basis,
    spread,
)
from dilocox.compression.registry import codec
from dilocox.errors import ConfigError, ExchangeError
from tests.support.lowrank_cases import (
    INT4,
    SHAPES,
    crafted,
    digests,
    draw,
    exchange,
    factors,
    flat_of,
    geometry_of,
    views,
)
from tests.support.patterns import with_threads

GOLDEN = {
    4: "577fe00055657f8c2925b6d795af438061c58e1c8e27443fe99f51f1ec804023",
    8: "0c89c84c58a272559d6bc963498575a8516f798dc043b088058c530257813723",
}


def test_bytes_are_those_of_the_format() -> None:
    geometry = geometry_of((160, 300), (64, 96), (300,), (64, 96), (40, 50), (0, 7))
    low = LowRank(geometry, 8)
    # 160 rows are 2 blocks, 300 columns 3; 64 x 96 1 and 1; dense: 300 and 2,000 values.
    assert low.factor_bytes == 8 * (2 + 1 + 1) * 66
    assert low.basis_bytes == 8 * (2 + 1 + 1) * 129
    assert low.warm_length == 8 * (3 + 1 + 1) * 128
    assert low.payload_bytes == 32 + 3 * 8 + 8 * (3 + 1 + 1) * 66 + 66 * (3 + 16)
    wide = LowRank(geometry, 10, bits=8)  # 64 x 96 pays no longer.
    assert wide.factor_bytes == 10 * 2 * 130
    assert wide.basis_bytes == 10 * 2 * 129
    assert wide.payload_bytes == 32 + 8 + 10 * 3 * 130 + 66 * (3 + 16 + 48 + 48)
    for each in (low, wide, LowRank(geometry, 1), LowRank(geometry, 500)):
        basis, payloads, _ = exchange(each, [draw(geometry, 1)], each.first_warm())
        assert each.project(draw(geometry, 1), each.first_warm()).shape == (each.factor_bytes,)
        assert basis.shape == (each.basis_bytes,)
        assert payloads[0].shape == (each.payload_bytes,)


def test_names_parts_and_frames() -> None:
    geometry = geometry_of(*SHAPES)
    low = LowRank(geometry, 8)
    assert (low.name, LowRank(geometry, 9, bits=8).name) == ("lowrank:8", "lowrank:9:int8")
    parts = (low.factor_part, low.basis_part, low.payload_part)
    assert len({part.identifier for part in parts}) == 3
    assert low.payload_part.identifier == low.identifier
    assert {part.numbers for part in parts} == {(low.rank, low.bits)}
    assert low.payload_part.values == geometry.length
    u = draw(geometry, 3)
    basis, payloads, decoded = exchange(low, [u], low.first_warm())
    messages = (low.project(u, low.first_warm()), basis, payloads[0])
    frames = [pack_frame(part, each) for part, each in zip(parts, messages, strict=True)]
    # What comes out of a frame starts at byte 64 of its storage.
    received = [unpack_frame(frame, part) for frame, part in zip(frames, parts, strict=True)]
    assert torch.equal(low.orthonormalise([received[0]]), basis)
    assert torch.equal(low.decode(received[2], received[1]), decoded[0])
    shifted = [torch.cat([each[:1], each])[1:] for each in (payloads[0], basis)]
    assert torch.equal(low.decode(*shifted), decoded[0])
    for rank, bits in ((0, 4), (8, 2)):
        with pytest.raises(ConfigError, match="rank from 1 and 4 or 8 bits"):
            LowRank(geometry, rank, bits)


@pytest.mark.parametrize("rank", [1, 8, 40])
def test_what_goes_dense_is_dense_int4(rank: int) -> None:
    geometry = geometry_of(*SHAPES)
    low, u = LowRank(geometry, rank), draw(geometry, 4)
    decoded = exchange(low, [u], low.first_warm())[2][0]
    as_int4 = codec("int4").decode(codec("int4").encode(u), geometry.length)
    same = [
        torch.equal(*pair)
        for pair in zip(views(geometry, decoded), views(geometry, as_int4), strict=True)
    ]
    # 6 x 2000 pays at rank 1 alone, 64 x 96 not at rank 40; the others are 1-D, small or empty.
    square = rank == 40
    assert same == [False, square, True, square, True, True, rank > 1, square, True]
    for start, end in geometry.gaps():
        assert not decoded[start:end].any()


def test_low_rank_goes_where_it_saves_a_quarter() -> None:
    assert pays(8192, 8192, 2048, INT4)
    assert not pays(8192, 1024, 2048, INT4)
    for rank in (1, 8, 17, 64):
        low = LowRank(geometry_of((512, 640)), rank)
        dense = codec("int4").payload_bytes(512 * 640)
        sent = low.payload_bytes - 32 - 8 + (low.factor_bytes + low.basis_bytes) / 2
        assert (sent <= 0.75 * dense) == (low.matrices == 1)
    assert LowRank(geometry_of((512, 640)), 300).matrices == 0


@pytest.mark.parametrize("bits", [4, 8])
@given(seed=st.integers(0, 1000), rank=st.integers(1, 9))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_decoding_is_exact_arithmetic_rounded_once(bits: int, seed: int, rank: int) -> None:
    rows, columns = 130, 260
    geometry = geometry_of((rows, columns))
    basis, payload = crafted(geometry, rank, bits, seed)
    low = LowRank(geometry, rank, bits)
    p, q = factors(low, payload, basis)
    decoded = low.decode(payload, basis)[: rows * columns].view(rows, columns)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(60):
        i, j = (int(torch.randint(n, (), generator=generator)) for n in (rows, columns))
        terms = [
            Fraction(a) * Fraction(b) for a, b in zip(p[i].tolist(), q[j].tolist(), strict=True)
        ]
        exact = sum(terms, Fraction(0))
        assert Fraction(float(exact)) == exact
        assert float(decoded[i, j]) == float(
            torch.tensor(float(exact), dtype=torch.float64).float()
        )


@pytest.mark.parametrize(("rank", "bits"), [(8, 4), (64, 8), (4000, 4), (65535, 8)])
def test_no_partial_sum_can_need_more_than_53_bits(rank: int, bits: int) -> None:
    width = spread(rank, bits)
    largest = 128 * 2 ** (bits - 1) * 255 * 2 ** (8 + width) * rank
    assert largest <= 2**53 < largest * 4
    assert width >= 7


@pytest.mark.parametrize("bits", [4, 8])
def test_order_of_the_rank_does_not_matter(bits: int) -> None:
    geometry = geometry_of((200, 384))
    rank = 32
    low = LowRank(geometry, rank, bits)
    basis, payload = crafted(geometry, rank, bits, 3)
    expected = low.decode(payload, basis)
    for seed in range(3):
        order = torch.randperm(rank, generator=torch.Generator().manual_seed(seed))

        def turned(message: Tensor, sizes: Sequence[int], order: Tensor = order) -> Tensor:
            pieces = message.split(list(sizes))
            return torch.cat([piece.view(rank, -1)[order].view(-1) for piece in pieces])

        other = turned(basis, (rank * 2, rank * 256))
        digest = torch.frombuffer(bytearray(payload_digest(other)), dtype=torch.uint8)
        body = turned(payload[40:], (rank * 3 * 2, rank * 3 * BLOCK * bits // 8))
        assert torch.equal(
            low.decode(torch.cat([digest, payload[32:40], body]), other).view(torch.int32),
            expected.view(torch.int32),
        )


def test_golden_bytes_in_this_process() -> None:
    assert with_threads(digests) == [GOLDEN] * 3


@pytest.mark.parametrize(
    ("capability", "threads"),
    [pytest.param("default", "2", marks=pytest.mark.slow), ("avx2", "1")],
)
def test_golden_bytes_on_lesser_processors(capability: str, threads: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.lowrank_cases"],
        env={
            **os.environ,
            "ATEN_CPU_CAPABILITY": capability,
            "OMP_NUM_THREADS": threads,
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    )
    assert dict(line.split() for line in found.stdout.splitlines()) == {
        str(bits): digest for bits, digest in GOLDEN.items()
    }


def test_flushing_denormals_changes_nothing() -> None:
    geometry = geometry_of((200, 384))
    low = LowRank(geometry, 8)
    # The faintest factors that are sent: scales of 2^-80 and steps of 2^-32.
    basis, payload = crafted(geometry, 8, 4, 5)
    basis[:16] = 26
    payload[40 : 40 + 48] = torch.full((24,), (127 - 80) << 7, dtype=torch.int16).view(torch.uint8)
    payload[:32] = torch.frombuffer(bytearray(payload_digest(basis)), dtype=torch.uint8)
    plain = low.decode(payload, basis)
    assert plain.abs().max() < 2**-90
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = low.decode(payload, basis)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(plain, flushed)


def test_a_sum_of_nothing_is_plus_zero() -> None:
    geometry = geometry_of((64, 128))
    low = LowRank(geometry, 1)
    basis, payload = crafted(geometry, 1, 4, 6)
    basis[1:] = 255  # codes of -1
    payload[:32] = torch.frombuffer(bytearray(payload_digest(basis)), dtype=torch.uint8)
    payload[42:] = 0
    assert not torch.signbit(low.decode(payload, basis)).any()


@pytest.mark.parametrize("bits", [4, 8])
@given(seed=st.integers(0, 1000), exponent=st.integers(-35, 40))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_quantisers_keep_their_bounds(bits: int, seed: int, exponent: int) -> None:
    rows, columns, rank = 140, 300, 6
    geometry = geometry_of((rows, columns))
    low, u = LowRank(geometry, rank, bits), draw(geometry, seed, 2.0**exponent)
    matrix = u[: rows * columns].view(rows, columns).double()
    basis, payloads, decoded = exchange(low, [u], low.first_warm())
    p, q = factors(low, payloads[0], basis)
    # Q: half a step of each block, and fp32 products. P: orthonormal up to its 8 bits.
    exact = matrix.T @ p
    step = torch.cat([part.abs().amax(0).expand_as(part) for part in exact.split(BLOCK)])
    step = step / (7 if bits == 4 else 127)
    assert ((q - exact).abs() <= step * 0.51 + exact.abs().max() * 1e-5).all()
    assert (p.T @ p - torch.eye(rank)).abs().max() < 0.03
    assert torch.equal(decoded[0][: rows * columns].view(rows, columns), (p @ q.T).float())
    missed = float(payloads[0][32:40].clone().view(torch.float64))
    energy = float(matrix.square().sum())
    assert missed == pytest.approx(energy - float(exact.square().sum()), rel=1e-5)


@pytest.mark.parametrize(("exponent", "dropped"), [(-26, False), (-27, True), (-60, True)])
def test_what_is_too_faint_for_a_sum_waits(exponent: int, dropped: bool) -> None:
    """Two columns that share a block of Q; at rank 2 they may be 2^26 apart."""
    geometry = geometry_of((128, 128))
    low = LowRank(geometry, 2)
    assert spread(2, 4) == 26
    strong, faint = torch.zeros(128, 128), torch.zeros(128, 128)
    strong[:64, :64] = 7.0
    faint[64:, 64:] = 7.0
    warm = torch.zeros(2, 128)
    warm[0, :64] = warm[1, 64:] = 1
    basis = exchange(low, [flat_of(strong + faint)], warm.view(-1))[0]
    faint *= 2.0**exponent

    def sent(u: Tensor) -> Tensor:
        return low.decode(low.encode(flat_of(u), basis), basis).view(128, 128)

    expected = strong if dropped else strong + faint
    assert torch.allclose(sent(strong + faint), expected, rtol=1e-6, atol=0)
    # Error feedback keeps it, and goes through once the strong column is done.
    assert torch.allclose(sent(strong + faint - expected), faint * dropped, rtol=1e-6, atol=0)


def test_a_basis_takes_coarser_steps_where_a_sum_could_not_hold_finer_ones() -> None:
    stack = Stack(0, 1, 3, 2 * BLOCK)
    values = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(4)).double()
    values /= values.abs().amax(1, keepdim=True)
    values[1, :BLOCK] *= 2.0**-12
    values[2] *= 2.0**-40
    payload = encode_basis(values.view(-1), [stack])
    assert payload.shape == (basis_bytes(3 * 2 * BLOCK),)
    decoded = decode_basis(payload, [stack], values.numel()).view(3, -1)
    steps = torch.full((3, 2 * BLOCK), 2.0**-6).double()
    steps[1, :BLOCK] = steps[2] = 2.0**-14
    assert ((decoded - values).abs() <= steps / 2).all()
    assert decoded[1, :BLOCK].any()
    assert not decoded[2].any()


def test_sizes_at_which_fp32_would_overflow_are_refused() -> None:
    geometry = geometry_of((160, 300))
    low, u = LowRank(geometry, 8), draw(geometry, 7)
    warm = low.first_warm()
    with pytest.raises(ExchangeError, match=r"beyond 2\^100"):
        low.project(u * 2.0**101, warm)
    basis, payloads, _ = exchange(low, [u], warm)
    # All columns alike, so that only the size is wrong: scales from 2^100 and from 2^101.
    for exponent, refused in ((100, False), (101, True)):
        scales = torch.full((24,), exponent + 127 << 7, dtype=torch.int16).view(torch.uint8)
        payload = torch.cat([payloads[0][:40], scales, payloads[0][88:]])
        if refused:
            with pytest.raises(ExchangeError, match="differ by more"):
                low.decode(payload, basis)
        else:
            assert low.decode(payload, basis).isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    geometry = geometry_of((160, 300))
    low, u = LowRank(geometry, 8), draw(geometry, 7)
    basis = exchange(low, [u], low.first_warm())[0]
    u[777] = bad
    if math.isfinite(bad):  # Factors are finite, their squares are not.
        assert low.project(u, low.first_warm()).shape == (low.factor_bytes,)
    else:
        with pytest.raises(ExchangeError, match="low-rank factor"):
            low.project(u, low.first_warm())
    with pytest.raises(ExchangeError, match="not exchanged"):
        low.encode(u, basis)


def damaged(message: Tensor, position: int, value: int) -> Tensor:
    other = message.clone()
    other[position] = value
    return other


def test_payloads_that_would_not_be_exact_are_refused() -> None:
    geometry = geometry_of((160, 300), (300,))
    low, u = LowRank(geometry, 8), draw(geometry, 8)
    warm = low.first_warm()
    factor = low.project(u, warm)
    basis, payloads, _ = exchange(low, [u], warm)
    payload = payloads[0]

    def bound(to: Tensor) -> Tensor:
        digest = torch.frombuffer(bytearray(payload_digest(to)), dtype=torch.uint8)
        return torch.cat([digest, payload[32:]])

    for number in (26, 20):
        wrong = damaged(basis, 1, number)
        with pytest.raises(ExchangeError, match="basis refused"):
            low.decode(bound(wrong), wrong)
    wrong = damaged(basis, 1, 27)
    wrong[16 + 128 : 16 + 256] = 0  # A step out of range, though no value needs it.
    with pytest.raises(ExchangeError, match="basis refused"):
        low.encode(u, wrong)
    scale = 32 + 8 + 1  # The upper byte of the first scale.
    for value, reason in (
        (0x7F, "scale"),
        (0x80, "scale"),
        (0xBF, "scale"),
        (0x7E, "differ by more"),
        (0x10, "differ by more"),
        (0x30, "differ by more"),
    ):
        with pytest.raises(ExchangeError, match=reason):
            low.decode(damaged(payload, scale, value), basis)
    for value in (0x7F, 0x80):
        with pytest.raises(ExchangeError, match="scale"):
            low.orthonormalise([factor, damaged(factor, 1, value)])
    dense = 32 + 8 + 8 * 3 * 66
    with pytest.raises(ExchangeError, match="scale"):
        low.decode(damaged(payload, dense + 1, 0xFF), basis)
    for value in (0xFF, 0x80):  # Missed energy: a NaN, a negative number.
        with pytest.raises(ExchangeError, match="residual energy"):
            low.decode(damaged(payload, 39, value), basis)


def test_messages_that_do_not_belong_together_are_refused() -> None:
    geometry = geometry_of((160, 300), (300,))
    low, u = LowRank(geometry, 8), draw(geometry, 9)
    warm = low.first_warm()
    basis, payloads, _ = exchange(low, [u], warm)
    other = exchange(low, [draw(geometry, 10)], warm)[0]
    with pytest.raises(ExchangeError, match="another basis"):
        low.decode(payloads[0], other)
    with pytest.raises(ExchangeError, match="another basis"):
        low.next_warm(payloads, [1.0], other, warm, 1)
    with pytest.raises(ExchangeError, match="another basis"):
        low.effective_rank(payloads, other)
    for wrong in (payloads[0][:-1], torch.cat([payloads[0], payloads[0][:1]])):
        with pytest.raises(ExchangeError, match=r"lowrank:8 payload of .* must be"):
            low.decode(wrong, basis)
    with pytest.raises(ExchangeError, match="basis payload of"):
        low.encode(u, basis[:-1])
    with pytest.raises(ExchangeError, match="factor payload of"):
        low.orthonormalise([low.project(u, warm)[:-1]])
    with pytest.raises(ExchangeError, match="no low-rank factor has arrived from any site"):
        low.orthonormalise([])
    with pytest.raises(ExchangeError, match="values, got"):
        low.encode(u[:-BLOCK], basis)
    with pytest.raises(ExchangeError, match="warm start of"):
        low.project(u, warm[:-BLOCK])
    for weights in ([], [1.0, 1.0], [0.0]):
        with pytest.raises(ExchangeError, match="cannot average"):
            low.next_warm(payloads, weights, basis, warm, 1)
    with pytest.raises(ExchangeError, match="other tensors"):
        LowRank(geometry_of((160, 300)), 8).fit_warm(warm, low)


FUZZED = geometry_of((64, 128), (40,))


def outcome(what: Callable[[], Tensor]) -> Tensor | None:
    """What was made, which must be finite where it is numbers; none where it was refused."""
    made, reason = None, ""
    try:
        made = what()
    except ExchangeError as error:
        reason = str(error)
    if made is None:
        assert reason
        assert "\n" not in reason
        return None
    assert not made.is_floating_point() or torch.isfinite(made).all()
    return made


def refused(check: Callable[[], None]) -> bool:
    try:
        check()
    except ExchangeError:
        return True
    return False


def any_bytes(size: int) -> st.SearchStrategy[Tensor]:
    """Messages of mostly the right size."""
    sizes = st.sampled_from([size] * 6 + [0, 1, size - 1, size + 1])
    kinds = st.sampled_from([0, 64, 128, 256])  # what bytes there are: scales of any size

    def made(drawn: tuple[int, int, int]) -> Tensor:
        length, most, seed = drawn
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, max(most, 1), (length,), generator=generator, dtype=torch.uint8)

    return st.tuples(sizes, kinds, st.integers(0, 2**32)).map(made)


@pytest.mark.parametrize("bits", [4, 8])
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_whatever_comes_is_refused_or_gives_numbers(bits: int, data: st.DataObject) -> None:
    """Any bytes as any of the three messages, and honest ones with some bytes changed."""
    low = LowRank(FUZZED, 3, bits)
    u = draw(FUZZED, 1)
    warm = low.first_warm()
    honest = low.project(u, warm)

    def damaged(message: Tensor, size: int) -> Tensor:
        if data.draw(st.booleans()):
            return data.draw(any_bytes(size))
        message = message.clone()
        for _ in range(data.draw(st.integers(1, 4))):
            message[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
        return message

    factor = damaged(honest, low.factor_bytes)
    basis = outcome(lambda: low.orthonormalise([honest, factor]))
    assert (basis is None) == refused(lambda: low.check_factor(factor))
    basis = damaged(low.orthonormalise([honest]), low.basis_bytes)
    payload = outcome(lambda: low.encode(u, basis))
    assert (payload is None) == refused(lambda: low.check_basis(basis))
    if payload is None:
        basis = low.orthonormalise([honest])
        payload = low.encode(u, basis)
    payload = damaged(payload, low.payload_bytes)
    if len(payload) == low.payload_bytes and data.draw(st.booleans()):
        digest = payload_digest(basis)  # as one who lies would do
        payload[:32] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    if outcome(lambda: low.decode(payload, basis)) is not None:
        assert outcome(lambda: low.next_warm([payload], [1.0], basis, warm, 1)) is not None
        assert math.isfinite(low.effective_rank([payload], basis) or 0.0)
