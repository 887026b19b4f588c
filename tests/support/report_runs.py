"""A run's folder with hand-made metrics: nothing was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BAD = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
"""Text that must stay text."""

RUN_FILE = """\
[run]
name = "toy"
[model]
path = "some/model"
[site]
stages = 2
shards = 1
[outer]
method = "dilocox"
rounds = 3
inner_steps = 20
[compression]
codec = "int4"
[record]
enabled = false
[sites.paris]
[sites.lyon]
"""


def site(round_: int, name: str, **changes: Any) -> dict[str, Any]:
    """A site's report of a round."""
    return {
        "kind": "round",
        "time": 1000.0 + 60 * round_,
        "round": round_,
        "site": name,
        "step": 20 * (round_ + 1),
        "loss": 5.0 - round_,
        "learning_rate": 0.001,
        "tokens": 300 if name == "paris" else 100,
        "seconds": 10.0,
        "wait_seconds": 1.0,
        "exchange_seconds": 4.0,
        "payload_bytes": 500,
        "members": 2,
        "contributors": 2,
        "repeated_exchanges": 0,
    } | changes


def whole(round_: int, **changes: Any) -> dict[str, Any]:
    """A round of the whole run."""
    return {
        "kind": "round",
        "time": 1000.5 + 60 * round_,
        "round": round_,
        "step": 20 * (round_ + 1),
        "loss": 5.0 - round_,
        "tokens": 400,
        "seconds": 10.0,
        "tokens_per_second": 40.0,
        "wait_share": 0.1,
        "payload_bytes": 1000,
        "allreduce_bytes": 100_000,
        "anchor_digest": f"{round_:064x}",
    } | changes


def rounds(*numbers: int) -> list[dict[str, Any]]:
    """Whole rounds of both sites."""
    return [
        record
        for number in numbers
        for record in (site(number, "paris"), site(number, "lyon"), whole(number))
    ]


def message(text: str, about: str = "") -> dict[str, Any]:
    """Something that happened."""
    record = {"kind": "message", "time": 1000.0, "text": text}
    return record | ({"about": about} if about else {})


def evaluation(after: int, loss: float) -> dict[str, Any]:
    """Held-out loss."""
    return {
        "kind": "evaluation", "time": 1001.0, "round": max(after, 0), "site": "paris",
        "after_round": after, "step": 20 * (after + 1), "val_loss": loss,
    }  # fmt: skip


def usual() -> list[dict[str, Any]]:
    """Three rounds, with what comes before and after."""
    return [
        message("paris enrolled", "members"),
        message("lyon enrolled", "members"),
        evaluation(-1, 6.0),
        *rounds(0, 1, 2),
        {"kind": "flush", "site": "paris", "round": 3, "payload_bytes": 700},
        {"kind": "flush", "site": "lyon", "round": 3, "payload_bytes": 300},
        evaluation(2, 3.5),
        message("finished", "members"),
    ]


def write_run(folder: Path, records: list[dict[str, Any]], phase: str = "finished") -> Path:
    """A run's folder; `phase` empty: it has not ended."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(RUN_FILE, encoding="utf-8")
    add(folder, records)
    if phase:
        end = {"name": "toy", "phase": phase, "reason": "", "sequences_committed": 12}
        (folder / "summary.json").write_text(json.dumps(end), encoding="utf-8")
    return folder


def add(folder: Path, records: list[dict[str, Any]]) -> None:
    """More lines of metrics."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
