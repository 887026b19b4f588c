"""Invariant 5: a run that is stopped twice equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from dilocox.data.manifest import MANIFEST, read_manifest, write_manifest
from tests.support.forge import Forge
from tests.support.harness import Run, Workshop, verdicts

pytestmark = pytest.mark.stops

# A stop takes effect some two beats of slots later (the lease), so the run must outlast two, and in
# the first case three deaths after them. Until the second stop steps are paced: a beat has few.
SETS = ("outer.rounds=36", "checkpoint.every_rounds=0")
OUTLASTING = "outer.rounds=28"
DEATHS = (
    "kill/write/1/paris-stage1-shard0",
    "kill/send/5/lyon-stage0-shard0",
    "kill/step/4/lyon-stage1-shard0",
)
"""Of the whole run: while a checkpoint is being written, while payloads travel, while it trains."""


@pytest.mark.slow
def test_a_checkpoint_that_is_gone_is_named(workshop: Workshop) -> None:
    """The founder may not go on from fresh weights when its part of the checkpoint is missing."""
    sets = ("outer.rounds=200", "checkpoint.every_rounds=0")
    run = workshop.start("gone", *sets)
    run.until_round(1)
    run.interrupt()
    assert run.wait() == 130, run.output()
    for part in (run.folder / "checkpoints").glob("tick-*/paris"):
        part.rename(run.folder.parent / "moved-away")
    again = workshop.start("gone", *sets, flags=("--resume",))
    assert again.wait() == 1
    assert "site paris lacks its part of the checkpoint" in again.printed()
    assert "Traceback" not in again.printed()


def altered_data(workshop: Workshop) -> Path:
    """Other token files than the workshop's runs train on, made with the same options."""
    folder = workshop.root / "altered-data"
    shutil.copytree(workshop.root / "data", folder)
    manifest = read_manifest(folder)
    content = manifest["content"] | {"held_out_below": "0" * 16}
    (folder / MANIFEST).unlink()
    (folder / "croissant.json").unlink()
    write_manifest(folder, content, manifest["made_with"])
    return folder


def model_bytes(run: Run) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted((run.folder / "model").glob("*.safetensors"))}


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        # Lyon takes 3.2 steps of paris's 8: three or four a round.
        (
            "keep",
            (
                OUTLASTING,
                "outer.inner_steps=8",
                "outer.momentum_dtype=bf16",
                "compression.codec=topk:64",
                "sites.lyon.speed=0.4",
                "checkpoint.every_rounds=6",
            ),
        ),
        pytest.param(
            "eager-reduce",
            ("outer.overlap=eager", "outer.fragments=1", "outer.exchange=reduce"),
            marks=pytest.mark.slow,
        ),
        # Both pieces of a stage travel as one fragment, and land in the next round.
        pytest.param(
            "together",
            (
                "control.adapt=link",
                'control.pinned=["inner_steps"]',
                "control.link=0.5kbit",
                "control.step_seconds=1",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param("reduce", ("outer.exchange=reduce", "outer.delay=3"), marks=pytest.mark.slow),
        pytest.param(
            "low-rank",
            ("outer.method=dilocox-paper", "compression.codec=lowrank:2", "outer.fragments=1"),
            marks=pytest.mark.slow,
        ),
        # Contributions under way at a stop are judged again, by all stages together.
        pytest.param(
            "gate",
            ("admission.gate=true", "admission.aggregation=clip", "outer.delay=3"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "late-gradients",
            ("outer.method=cocktailsgd", "outer.fragments=1"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_stops_change_nothing(
    workshop: Workshop, forge: Forge, name: str, sets: tuple[str, ...]
) -> None:
    """And, in the first case, three deaths of the whole run: `DEATHS`."""
    whole = workshop.train(f"whole-{name}", *SETS, *sets)
    cut = forge.train(workshop, f"cut-{name}", *SETS, *sets, hooks="paced")
    cut.until_round(1)
    cut.interrupt()
    assert cut.wait() == 130, cut.output()
    assert "--resume" in cut.printed()
    if name == "keep":
        other = f"data.folder={altered_data(workshop)}"
        refused = forge.train(workshop, f"cut-{name}", *SETS, *sets, other, flags=("--resume",))
        assert refused.wait() == 1, refused.output()
        assert refused.printed().count("its token files differ from the first site's") == 1
    stopped_at = len(cut.records())
    again = forge.train(workshop, f"cut-{name}", *SETS, *sets, hooks="paced", flags=("--resume",))
    again.until(lambda: len(again.records()) > stopped_at)
    again.terminate()
    assert again.wait() == 130, again.output()
    for moment in DEATHS if name == "keep" else ():
        dies = forge.train(workshop, f"cut-{name}", *SETS, *sets, hooks=moment, flags=("--resume",))
        assert dies.wait() == -signal.SIGKILL, f"{moment}: {dies.output()}"
    last = workshop.start(f"cut-{name}", *SETS, *sets, flags=("--resume",))
    assert last.wait() == 0, last.output()
    assert model_bytes(last) == model_bytes(whole)
    assert last.summary()["anchor_digest"] == whole.summary()["anchor_digest"]
    assert last.summary()["val_loss_last"] == whole.summary()["val_loss_last"]
    assert last.summary()["tokens"] == whole.summary()["tokens"]
    if name == "together":
        rounds = [record for record in whole.records("plan") if record["slots"]]
        assert {(record["fragments"], record["delay"]) for record in rounds} == {(1, 5)}
    if name == "gate":
        sites = ("paris", "lyon")
        judged = [r for run in (last, whole) for s in sites for r in run.records("admission", s)]
        assert all(r.get("gain") is not None for r in judged), "some was not judged again"
    # The record tells the course that was gone on with, and replays to that model.
    no_outer_steps = {"commitments": "NOT_RUN", "replay": "NOT_RUN"}
    assert verdicts(last.folder) == (no_outer_steps if name == "late-gradients" else {})


# --- the whole run dies --------------------------------------------------------------------------

KILLS = 20
LONG = 280.0
"""Seconds: there are many processes."""
DYING = ("checkpoint.every_rounds=1", "network.heartbeat=20")


def random_moments(count: int, ranks: Sequence[str]) -> list[str]:
    """Moments of the next start of a run, as hooks: every place comes up before any does again.

    Few calls each, so that the run is still going on at the last of them.
    """
    from tests.support.forked import PLACES  # imports torch and transformers

    draw = random.Random(20)
    most = {"step": 12, "load": 3, "write": 2, "send": 4, "vote": 4, "landing": 4}
    places: list[str] = []
    while len(places) < count:
        places += draw.sample(sorted(PLACES), len(PLACES))
    return [
        f"kill/{place}/{draw.randint(1, most[place])}/{draw.choice(ranks)}"
        for place in places[:count]
    ]


def has_checkpoint(run: Run) -> bool:
    """The coordinator has recorded a checkpoint of all ranks."""
    path = run.folder / "coordinator" / "coordinator.sqlite"
    if not path.exists():
        return False
    log = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return bool(log.execute("SELECT 1 FROM events WHERE kind = 'Kept'").fetchone())
    except sqlite3.OperationalError:  # not created yet
        return False
    finally:
        log.close()


def dies_again_and_again(
    workshop: Workshop, forge: Forge, name: str, sets: Sequence[str], moments: Sequence[str]
) -> None:
    """A run that is killed as a whole once it has a checkpoint, and at each of `moments` of the
    start after, ends as one that was not disturbed."""
    whole = workshop.start(f"whole-{name}", *sets)
    assert whole.wait(LONG) == 0, whole.output()
    run: Run = workshop.start(name, *sets)
    run.until(lambda: has_checkpoint(run), LONG)
    run.process.kill()
    assert run.wait(LONG) == -signal.SIGKILL
    for moment in moments:
        run = forge.train(workshop, name, *sets, hooks=moment, flags=("--resume",))
        assert run.wait(LONG) == -signal.SIGKILL, f"{moment}: {run.output()}"
    last = workshop.start(name, *sets, flags=("--resume",))
    assert last.wait(LONG) == 0, last.output()
    assert model_bytes(last) == model_bytes(whole)
    for key in ("anchor_digest", "val_loss_last", "tokens", "rounds"):
        assert last.summary()[key] == whole.summary()[key]
    assert last.sequences_amiss() == (0, 0)
    assert verdicts(last.folder) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_deaths_of_the_whole_run_change_nothing(workshop: Workshop, forge: Forge) -> None:
    sets = (*DYING, "outer.rounds=36", "sites.lyon.speed=0.4", "outer.delay=3")
    ranks = [f"{site}-stage{stage}-shard0" for site in ("paris", "lyon") for stage in (0, 1)]
    dies_again_and_again(workshop, forge, "dying", sets, random_moments(KILLS - 1, ranks))
