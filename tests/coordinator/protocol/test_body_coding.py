"""Bodies of requests: small with the dictionary, the same again, and bounded when unpacked."""

from __future__ import annotations

import random
import zlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.body_coding import compressed, decompressed
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.verdicts import RankOpinion
from dilocox.record.log.statements import Signer
from dilocox.record.writer.exchange_statements import commitment, contribution
from tests.support.scripts import tool

MOST = m.MAX_BODY


RANDOM = random.Random(0)


def digest() -> str:
    return RANDOM.randbytes(32).hex()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=5000))
def test_every_body_comes_back(body: bytes) -> None:
    assert decompressed(compressed(body), MOST) == body


@pytest.mark.parametrize("round_", [7, 38, 640, 12_345])
@pytest.mark.parametrize("site", ["a", "paris", "site-17"])
def test_signed_requests_are_less_than_half_as_long(round_: int, site: str) -> None:
    RANDOM.seed(f"{site} {round_}")
    key, signer = (
        ExchangeKey.outer(round_, 0, 3),
        Signer(Ed25519PrivateKey.from_private_bytes(RANDOM.randbytes(32))),
    )
    rank, run = m.RankId(site=site, stage=0, shard=0), digest()
    promise = signer.sign(commitment(run, rank, key, digest(), digest()))
    vote = signer.sign(contribution(run, rank, key, 1, digest()))
    held = {name: digest() for name in (site, "lyon")}
    requests = (
        m.BeginRequest(key=key.text, rank=rank, commitment=promise, wait=20.0),
        m.VoteRequest(
            key=key.text,
            rank=rank,
            attempt=1,
            held=list(held),
            digests=held,
            statement=vote,
            opinions={
                name: RankOpinion(code="admitted", digest=each) for name, each in held.items()
            },
        ),
    )
    for request in requests:
        body = request.model_dump_json().encode()
        short = compressed(body)
        assert len(short) < 0.45 * len(body)
        assert len(short) < 0.65 * len(zlib.compress(body, 9))  # without the dictionary


def test_a_body_that_grows_too_large_is_refused_without_unpacking_it() -> None:
    bomb = compressed(b" " * (64 << 20))
    assert len(bomb) < 100_000
    with pytest.raises(ValueError, match="above 1048576 bytes"):
        decompressed(bomb, MOST)
    assert decompressed(compressed(b" " * MOST), MOST) == b" " * MOST


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut short"),
        (b"{}", "not compressed with this version's dictionary"),
        (compressed(b'{"rank":{}}')[:-1], "cut short"),
        (compressed(b"{}") + b"more", "followed by other bytes"),
        (compressed(b"{}")[:-1] + b"\0", "not compressed with"),  # wrong checksum
        (zlib.compressobj(9, zdict=b"of another version").flush(), "not compressed with"),
    ],
)
def test_other_bytes_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decompressed(content, MOST)


def test_the_dictionary_is_what_the_requests_of_this_version_have_in_common() -> None:
    script = tool("write_common_text")
    assert script.TARGET.read_bytes() == script.made(), (
        "run python scripts/write_common_text.py: the requests have changed"
    )
