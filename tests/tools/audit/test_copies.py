"""A state that is copied beside training is whole before training changes anything of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.neighbours import STEPS, Neighbour, Registry, run_config
from tests.support.streams import play_device
from tests.training.launch.test_preflight import write_text
from torch import Tensor

from dilocox.data import prepare
from dilocox.outer.staging import Snapshot, snapshot
from dilocox.record.writer.state_recorder import Capture


class Late:
    """A `RoundWatch` that begins to copy each round's state, and looks at it much later."""

    def __init__(self) -> None:
        self.taken: list[tuple[Snapshot, dict[str, Tensor]]] = []

    def boundary(self, round_: int, tick: int, trains: bool, capture: Capture) -> None:
        tensors, _ = capture()
        found = snapshot(tensors)
        self.taken.append((found, {name: each.detach().clone() for name, each in tensors.items()}))

    def step(self, numbers: Tensor, parameters: Iterable[Tensor]) -> None:
        pass

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("pace", [1000, 1000 // STEPS], ids=["fast", "slow"])
def test_copies_are_of_the_boundary(
    pace: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow site has its first boundary before its first inner step."""
    torch.set_num_threads(1)
    driver = play_device(monkeypatch)
    write_text(tmp_path / "text", 0)
    config = run_config(tmp_path, "run")
    files = prepare(config.data, config.data_folder, config.run.seed)
    config.folder.mkdir(parents=True)
    registry = Registry(config, {"paris": pace}, {})
    registry.gone = {site for site in config.sites if site != "paris"}
    paris = Neighbour(registry, "paris", 0, files)
    registry.gone = set()
    watch: Any = Late()
    paris.trainer.watch = watch
    for round_ in range(3):
        paris.trainer.train_round(registry.plan(round_))
        for copies, expected in watch.taken:
            found = copies.tensors()
            assert found.keys() == expected.keys()
            assert [n for n in found if not torch.equal(found[n], expected[n])] == []
    live = {f"live/{name}" for name in paris.rank.live}
    (_, first), (_, second), _ = watch.taken
    assert not all(torch.equal(first[name], second[name]) for name in live), "it has trained"
    assert driver.copied
    registry.notary.close()
