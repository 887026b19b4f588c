"""Writes the dictionary with which request bodies are compressed.

The text is made of the requests of a round, as their own classes write them, without digests,
signatures and figures. Base64 writes a word in one of three forms, which depends on the number of
bytes before the word. So each signed request is written for round numbers of three lengths.

    python scripts/write_common_text.py           writes the file
    python scripts/write_common_text.py --check   exits with 1 if the file is not up to date
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.round_plan import Message
from dilocox.coordinator.protocol.verdicts import RankOpinion
from dilocox.record.log import statements as s
from dilocox.record.log.canonical import dumps

TARGET = (
    Path(__file__).parents[1] / "src" / "dilocox" / "coordinator" / "protocol" / "common_text.txt"
)
RANK = m.RankId(site="a", stage=0, shard=0)
DIGEST = "0" * 64
ROUNDS = (1, 10, 100)
"""Round numbers of one, two and three digits."""
FIGURES = (
    "site", "step", "steps", "tokens", "seconds", "tokens_per_second", "learning_rate",
    "wait_seconds", "wait_share", "waited_for", "exchange_seconds", "exchange_work_seconds",
    "link_bytes", "link_seconds", "payload_bytes", "allreduce_bytes", "ratio_per_transfer",
    "ratio_per_token", "members", "contributors", "repeated_exchanges", "anchor_digest",
    "peak_memory_bytes", "loss", "grad_norm",
)  # fmt: skip
"""Names of a round's metrics, in the order in which a rank reports them."""


def main() -> int:
    """Write the file, or check it. Returns the exit code."""
    text = made()
    if "--check" not in sys.argv[1:]:
        TARGET.write_bytes(text)
        return 0
    if TARGET.is_file() and TARGET.read_bytes() == text:
        return 0
    print(f"{TARGET.name} is not up to date: run python scripts/write_common_text.py")
    return 1


def made() -> bytes:
    """Return the dictionary."""
    return b"\n".join(_without_values(request.model_dump_json()) for request in requests())


def requests() -> Iterator[Message]:
    """Yield the requests of a round; those that a rank sends most often come last."""
    yield m.BeatRequest(rank=RANK, tick=1, round=1, slot=1, slot_seconds=1.0)
    measured = m.Measured(
        step_us=1, exchange_bytes=1, exchange_us=1, exchanges=1, overhead_us=1, work_us=1
    )
    yield m.RoundDoneRequest(rank=RANK, round=1, measured=measured)
    yield m.ReportRequest(rank=RANK, round=1, metrics=dict.fromkeys(FIGURES, 1))
    for round_ in ROUNDS:
        kept = {"kind": "round", "round": round_, "stage": 0}
        yield m.StateRequest(rank=RANK, statement=signed(s.REPORT, {"report": DIGEST}, kept))
    for round_ in ROUNDS:
        key = f"outer/{round_}/0/0"
        of_key = {"round": round_, "exchange_key": key}
        digests = {"values": DIGEST, "payload": DIGEST}
        yield m.BeginRequest(
            key=key, rank=RANK, commitment=signed(s.COMMITMENT, digests, of_key), wait=m.MAX_POLL
        )
        yield m.VoteRequest(
            key=key,
            rank=RANK,
            attempt=1,
            held=["a", "b"],
            digests={"a": DIGEST},
            statement=signed(s.CONTRIBUTION, {"payload": DIGEST}, {**of_key, "attempt": 1}),
            opinions={"a": RankOpinion(code="admitted", digest=DIGEST)},
            wait=m.MAX_POLL,
        )


def signed(kind: str, digests: dict[str, str], predicate: dict[str, object]) -> str:
    """Return an envelope of a statement without digests and signature, which no reader accepts."""
    whole = {"run": DIGEST, "site": "a", "shard": 0, **predicate}
    payload = _without_values(s.Statement(kind, digests, whole).to_bytes().decode())
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": s.PAYLOAD_TYPE,
        "signatures": [{"keyid": DIGEST, "sig": ""}],
    }
    return dumps(envelope).decode()


def _without_values(text: str) -> bytes:
    return re.sub("0{64}", "", text).encode()


if __name__ == "__main__":
    sys.exit(main())
