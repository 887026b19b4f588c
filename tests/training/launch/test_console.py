"""What people read: sizes, counts, the line of a round."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dilocox.config.run_config import resolve_run
from dilocox.coordinator.protocol import messages as m
from dilocox.training.launch.console import Display, round_line
from dilocox.training.launch.supervisor import print_error
from dilocox.utils.formatting import number, size
from tests.support.coordinator_driver import run_config

pytestmark = pytest.mark.waits


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.0 kB"),
        (1000, "1.0 kB"),
        (1234567, "1.2 MB"),
        (999_960, "1.0 MB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (12, "12"), (999.7, "1.0k"), (12345, "12.3k"), (5.2e6, "5.2M"), (7e12, "7000.0G")],
)
def test_counts(count: float, text: str) -> None:
    assert number(count) == text


UNITS = {"": 1.0, "B": 1.0, "k": 1e3, "kB": 1e3, "M": 1e6, "MB": 1e6, "G": 1e9, "GB": 1e9}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(count=st.floats(0, 9e11))
def test_what_is_shown_is_within_its_last_digit(count: float) -> None:
    for text in (
        size(count),
        number(count).replace("k", " k").replace("M", " M").replace("G", " G"),
    ):
        digits, _, unit = text.partition(" ")
        scale = UNITS[unit]
        assert abs(float(digits) * scale - count) <= (0.5 if scale == 1 else 0.05 * scale) * 1.0001
        assert float(digits) < 1000 or unit in ("G", "TB")


RECORD = {
    "kind": "round",
    "round": 4,
    "step": 100,
    "loss": 3.14159,
    "tokens_per_second": 12345.0,
    "wait_share": 0.256,
    "payload_bytes": 1_200_000,
    "allreduce_bytes": 240_000_000,
    "ratio_per_transfer": 7.9,
    "ratio_per_token": 200.0,
}


def test_the_line_of_a_round() -> None:
    assert round_line(RECORD, 2000) == (
        "round   4  step  100/2000  loss 3.142   12.3k tokens/s  waited 25.6%  sent   1.2 MB "
        "(synchronous 240.0 MB; 7.9x per transfer, 200x per token)"
    )
    without = {key: value for key, value in RECORD.items() if key != "loss"}
    assert "loss -  " in round_line(without, 2000)


def test_the_line_of_a_round_on_gpus() -> None:
    record = {**RECORD, "mfu": 0.4123, "peak_memory_bytes": 62_100_000_000, "allocation_retries": 0}
    assert "waited 25.6%  MFU 41.2%  memory 62.1 GB  sent   1.2 MB" in round_line(record, 2000)
    retried = round_line({**record, "allocation_retries": 3}, 2000)
    assert "memory 62.1 GB  (allocator retried 3 times)  sent" in retried


PLAN = {
    "kind": "plan", "round": 2, "step": 40, "inner_steps": 5, "slots": 5, "fragments": 4,
    "delay": 1,
    "codec": "topk:82", "reason": "9 kB in 0.4 s of 0.5 s",
}  # fmt: skip


def test_plans_are_shown_where_they_change() -> None:
    assert shown(PLAN, terminal=False) == (
        "round   2  plan: 5 inner steps, 4 fragments, codec topk:82, landing 1 of 5 slots later "
        "(9 kB in 0.4 s of 0.5 s)\n"
    )
    assert shown(PLAN, terminal=False, adapt="off") == ""


def shown(*records: dict[str, Any], terminal: bool, adapt: str = "link") -> str:
    raw = {"model": {"path": "x"}, "sites": {"a": {}}, "control": {"adapt": adapt}}
    display = Display(resolve_run(raw))
    stream = io.StringIO()
    display._console = Console(file=stream, width=300, highlight=False, force_terminal=False)
    display._lively = terminal
    for record in records:
        display.show(record)
    return stream.getvalue()


def test_rounds_and_events_are_shown_off_a_terminal_too() -> None:
    message = {"kind": "message", "text": "lyon [left]"}
    loss = {"kind": "evaluation", "after_round": -1, "val_loss": 6.25}
    text = shown(RECORD, message, loss, terminal=False)
    first, *rest = text.splitlines()
    assert first.startswith("round   4  step 100/200 ")
    assert rest == ["lyon [left]", "held-out loss before training: 6.2500"]
    lively = shown(RECORD, {**RECORD, "site": "paris"}, terminal=True)
    assert lively.count("round   4  step 100/200 ") == 1


def test_a_member_moves_nobodys_cursor() -> None:
    """Neither on a terminal nor in a pipe that `less -R` reads."""
    out = io.StringIO()
    for terminal in (True, False):
        console = Console(file=out, force_terminal=terminal, highlight=False, soft_wrap=True)
        shown = Display(run_config(), console)
        shown.show({"kind": "message", "text": "lyon: \x1b[2J\x1b[HPASS\nverified: \u202ellA"})
        shown.line("two\nlines\x9b2J")
    text = out.getvalue()
    assert "lyon: \ufffd[2J\ufffd[HPASS verified: \ufffdllA\n" in text
    assert "two\nlines\ufffd2J\n" in text
    assert not {"\x1b", "\x9b", "\u202e"} & set(text)


def test_reasons_of_members_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    rank = m.RankId(site="lyon", stage=0, shard=0)
    said = m.LeaveRequest(rank=rank, reason="\x1b[31mbroken\x1b[0m\r\n")
    assert said.reason == "\ufffd[31mbroken\ufffd[0m "
    print_error("gone: \x1b[2Jx")
    assert capsys.readouterr().err == "dilocox: gone: \ufffd[2Jx\n"
