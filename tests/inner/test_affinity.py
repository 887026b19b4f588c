"""Which cores a rank keeps, from what Linux says of its GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dilocox.inner.affinity import nearest_cores, parse_cores, pci_name, stay_near

pytestmark = pytest.mark.waits


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("7", {7}), ("\n", set())],
)
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize(
    ("present", "node", "local", "kept"),
    [
        ({0, 1, 2, 3}, "1\n", "2-3\n", {2, 3}),
        ({0, 1}, "1", "1-64", {1}),
        ({0, 1}, "-1", "0", None),
        ({0, 1}, "0", "0-63", None),
        ({0, 1}, "1", "32-63", None),
    ],
    ids=["half", "no more than before", "no nodes", "all near", "none near"],
)
def test_the_cores_next_to_a_gpu(
    present: set[int], node: str, local: str, kept: set[int] | None
) -> None:
    assert nearest_cores(present, node, local) == kept


class Machine:
    """A machine of eight cores, and a GPU that is near the last four."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mask = set(range(8))
        self.gpu = folder / "0001:a1:00.0"
        self.gpu.mkdir()
        (self.gpu / "numa_node").write_text("1\n")
        (self.gpu / "local_cpulist").write_text("4-7\n")
        found = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xA1, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(self.mask), raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", self.set_mask, raising=False)

    def set_mask(self, _pid: int, cores: set[int]) -> None:
        self.mask = set(cores)


def test_a_rank_stays_near_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch)
    machine.mask = {0, 5, 6}
    assert stay_near(torch.device("cuda", 0), tmp_path) == {5, 6}
    assert machine.mask == {5, 6}
    assert stay_near(torch.device("cuda", 0), tmp_path) is None


@pytest.mark.parametrize(("fit", "before", "after"), [(True, 8, 4), (True, 3, 3), (False, 8, 8)])
def test_no_more_threads_than_cores_stay_unless_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fit: bool, before: int, after: int
) -> None:
    Machine(tmp_path, monkeypatch)
    threads = [before]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    stay_near(torch.device("cuda", 0), tmp_path, fit_threads=fit)
    assert threads[-1] == after


@pytest.mark.parametrize("said", ["", "what?"])
def test_a_machine_that_does_not_tell_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    (machine.gpu / "numa_node").write_text(said)
    assert stay_near(torch.device("cuda", 0), tmp_path) is None
    (machine.gpu / "numa_node").unlink()
    assert stay_near(torch.device("cuda", 0), tmp_path) is None
    assert stay_near(torch.device("cpu"), tmp_path) is None
    assert machine.mask == set(range(8))


def test_names_of_pci_devices() -> None:
    assert pci_name(0, 0x3B, 0) == "0000:3b:00.0"
