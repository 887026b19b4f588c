"""Where NCCL's flight records lie, and what the user has said about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.inner.flight_recorder import record_collectives, settings

pytestmark = pytest.mark.waits

PREFIX = Path("/run/logs/lyon-stage0-shard0-nccl-")


def test_all_is_set_where_nothing_was() -> None:
    assert settings({}, PREFIX) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(PREFIX),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}),
        ("TORCH_FR_BUFFER_SIZE", {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}),
        (
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
            {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"},
        ),
    ],
)
def test_what_the_user_said_by_either_name_stays(said: str, left: set[str]) -> None:
    """The new name would win over the old one that the user has set."""
    assert settings({said: "0"}, PREFIX).keys() == left


def test_the_folder_is_there_before_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    record_collectives(tmp_path / "logs" / "a-")
    assert (tmp_path / "logs").is_dir()
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "logs" / "a-")
