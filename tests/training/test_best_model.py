"""The model with the lowest held-out loss: which one it is, and that it is replaced as a whole."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.data import TokenFiles
from dilocox.errors import ConfigError
from dilocox.models import load_model_config
from dilocox.training import best_model, checkpointing
from dilocox.training.builder import ModelPlan, RankParts, RankPlace
from dilocox.training.checkpointing import Checkpointer
from dilocox.training.launch.site_log import note_joined
from tests.support.architectures import reference_model

pytestmark = pytest.mark.waits


def run_of(root: Path, **sections: Any) -> RunConfig:
    return resolve_run(
        {
            "run": {"name": "best", "folder": str(root / "run")},
            "model": {
                "architecture": {
                    "model_type": "llama",
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                }
            },
            "sites": {"paris": {}, "lyon": {}},
            "checkpoint": {"best": True},
            "evaluation": {"every_rounds": 1},
            **sections,
        }
    )


class Told:
    """What a rank has reported to the coordinator."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def report(self, round_: int, metrics: dict[str, Any], kind: str = "round") -> None:
        assert kind == "warning"
        self.texts.append(metrics["text"])


class Site:
    """A site of one rank whose anchor holds one number everywhere."""

    def __init__(
        self, run: RunConfig, name: str = "paris", shared: bool = False, shard: int = 0
    ) -> None:
        self.run, self.told, self.met = run, Told(), 0
        model = reference_model(load_model_config(run.model, 96))
        self.anchor = {name: p.detach() for name, p in model.named_parameters()}
        rank = SimpleNamespace(
            place=RankPlace(name, 0, shard),
            blueprint=ModelPlan.of(run, 96),
            mesh=SimpleNamespace(stages=1, shards=1, gather_names=self._gather),
            model=SimpleNamespace(saved_buffers=dict),
            states=[
                SimpleNamespace(
                    layout=SimpleNamespace(views=lambda _: self.anchor), anchor=None
                )
            ],
        )  # fmt: skip
        files = cast(TokenFiles, SimpleNamespace(tokenizer_folder=None, ends_of_turn=()))
        self.checkpointer = Checkpointer(
            run, cast(RankParts, rank), files, shared, cast(Any, self.told), None, lambda: None
        )
        self.rank = cast(RankParts, rank)

    def _gather(self, names: list[str]) -> list[list[str]]:
        self.met += 1
        return [names]

    def evaluate(self, round_: int, loss: float, first: bool = True) -> None:
        """An evaluation of an anchor that is full of the round's number."""
        for tensor in self.anchor.values():
            tensor.fill_(float(round_))
        self.checkpointer.keep_best(self.rank, round_, loss, first=first)

    @property
    def kept(self) -> tuple[int, float] | None:
        """(round, loss) of the model in `model-best/`, which has the values of that round."""
        folder = self.run.folder / "model-best"
        if not folder.exists():
            return None
        said = json.loads((folder / "held_out.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        assert files
        for tensor in (t for file in files for t in load_file(file).values()):
            assert torch.equal(tensor, torch.full_like(tensor, said["after_round"]))
        assert (folder / "config.json").exists()
        return said["after_round"], said["val_loss"]


def test_the_lowest_loss_stays(tmp_path: Path) -> None:
    site = Site(run_of(tmp_path))
    site.run.folder.mkdir()
    site.evaluate(-1, 0.5)
    assert site.kept is None, "the model before training is no model of the run"
    for round_, loss, best in [
        (0, 4.0, 0), (1, float("nan"), 0), (2, 3.0, 2), (3, 3.0, 2), (4, 3.5, 2), (5, 2.0, 5),
    ]:  # fmt: skip
        site.evaluate(round_, loss)
        assert site.kept is not None
        assert site.kept[0] == best
    # A run that is resumed knows it from the folder.
    again = Site(site.run)
    again.evaluate(3, 2.5)
    assert again.kept == (5, 2.0)
    again.evaluate(6, 1.5)
    assert again.kept == (6, 1.5)
    assert sorted(path.name for path in site.run.folder.iterdir()) == ["model-best"]
    assert site.told.texts == again.told.texts == []


def test_nothing_is_written_unasked(tmp_path: Path) -> None:
    site = Site(run_of(tmp_path, checkpoint={}))
    site.run.folder.mkdir()
    site.evaluate(0, 4.0)
    assert list(site.run.folder.iterdir()) == []


def test_in_a_folder_of_all_sites_only_the_first_writes(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.folder.mkdir()
    paris, lyon = Site(run, shared=True), Site(run, "lyon", shared=True)
    paris.evaluate(0, 4.0)
    lyon.evaluate(0, 3.9, first=False)
    assert paris.kept == (0, 4.0)
    # The first site is lost, and the other one evaluates.
    lyon.evaluate(1, 3.0)
    assert lyon.kept == (1, 3.0)
    own = Site(run_of(tmp_path / "own"), "lyon")
    own.run.folder.mkdir(parents=True)
    own.evaluate(0, 3.0, first=False)
    assert own.kept == (0, 3.0)


def test_ranks_meet_whatever_each_of_them_finds_on_the_disk(tmp_path: Path) -> None:
    """A rank that asks before the first site has joined here, and one that asks after that."""
    run = run_of(tmp_path)
    run.folder.mkdir()
    leading, other = Site(run, "lyon"), Site(run, "lyon", shard=1)
    other.evaluate(0, float("nan"), first=False)
    note_joined(run, "paris", "here:1")
    leading.evaluate(0, 3.0, first=False)
    assert (leading.met, other.met) == (1, 1)
    assert leading.kept is None, "the first site writes"
    other.evaluate(1, 3.0, first=False)
    assert other.met == 2


@pytest.mark.parametrize("crash", ["before the first", "between the two"])
def test_a_replacement_that_was_cut_off_is_completed(tmp_path: Path, crash: str) -> None:
    site = Site(run_of(tmp_path))
    run = site.run.folder
    run.mkdir()
    site.evaluate(0, 4.0)
    if crash == "between the two":
        # The new one is whole, and the old one has been renamed already.
        site.evaluate(1, 3.0)
        (run / "model-best").rename(best_model.partial(run, "paris"))
        (run / "model-best.paris.old").mkdir()
        assert best_model.lowest(run, "paris") == 3.0
        assert site.kept == (1, 3.0)
    else:
        part = best_model.partial(run, "paris")
        part.mkdir()
        (part / "model.safetensors").write_text("half")
        (part / "left.txt").write_text("")
        site.evaluate(1, 3.0)
        assert site.kept == (1, 3.0)
        assert not (run / "model-best" / "left.txt").exists()
    assert sorted(path.name for path in run.iterdir()) == ["model-best"]


def test_a_note_that_cannot_be_read_is_replaced(tmp_path: Path) -> None:
    site = Site(run_of(tmp_path))
    site.run.folder.mkdir()
    site.evaluate(0, 4.0)
    for text in ("", "[]", '{"val_loss": "x"}', '{"val_loss": NaN}'):
        (site.run.folder / "model-best" / "held_out.json").write_text(text)
        assert best_model.lowest(site.run.folder, "paris") is None
    site.evaluate(1, 5.0)
    assert site.kept == (1, 5.0)


def test_a_disk_that_fails_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    site = Site(run_of(tmp_path))
    site.run.folder.write_text("a file where the run folder should be")
    site.evaluate(0, 4.0)
    assert len(site.told.texts) == 1
    assert "the best model was not written" in site.told.texts[0]


@pytest.mark.parametrize("fails", ["the weights", "the note"])
def test_a_full_disk_keeps_the_earlier_model_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A half model would take room on the full disk until a later one is better."""
    site = Site(run_of(tmp_path))
    site.run.folder.mkdir()
    site.evaluate(0, 4.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if fails == "the weights":
            patch.setattr(checkpointing, "finish_model_folder", full)
        else:
            patch.setattr(best_model, "put", full)
        site.evaluate(1, 3.0)
    assert ["No space left" in text for text in site.told.texts] == [True]
    assert site.kept == (0, 4.0)
    assert [path.name for path in site.run.folder.iterdir()] == ["model-best"]
    site.evaluate(2, 3.5)
    assert site.kept == (2, 3.5)


@pytest.mark.parametrize("fails", ["the weights", "the name"])
def test_a_model_beside_a_checkpoint_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    site = Site(run_of(tmp_path))
    site.run.folder.mkdir()
    folder = site.run.folder / "model-tick-00000008"

    def write() -> str:
        at, plan = SimpleNamespace(tick=8), SimpleNamespace(kind="train", members={"paris": None})
        own = SimpleNamespace(at=at, site="paris", rank=site.rank)
        return site.checkpointer._exported_beside(cast(Any, own), cast(Any, plan), skipped=False)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if fails == "the weights":
            patch.setattr(checkpointing, "finish_model_folder", full)
        else:
            patch.setattr(Path, "replace", full)
        assert "No space left" in write()
    assert list(site.run.folder.iterdir()) == []
    for _ in range(2):  # a resumed run writes the same checkpoint again
        assert write() == ""
        assert [path.name for path in site.run.folder.iterdir()] == [folder.name]
        assert (folder / "config.json").exists()


def test_best_without_evaluations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set every_rounds, or leave best out"):
        run_of(tmp_path, evaluation={})
