"""Everything random hangs on run.seed, dropout too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.training.builder import RankPlace
from dilocox.training.launch import rank
from dilocox.training.launch.rank import random_seed
from dilocox.training.launch.rank_job import RankJob

pytestmark = pytest.mark.waits


def config(seed: int) -> RunConfig:
    return resolve_run(
        {
            "run": {"seed": seed},
            "model": {"architecture": {"model_type": "qwen3"}},
            "site": {"shards": 2, "batch_size": 8, "micro_batch_size": 2},
            "sites": {"paris": {}, "lyon": {}},
        }
    )


def test_every_rank_has_a_stream_of_its_own_and_the_same_in_every_run() -> None:
    places = [RankPlace(site, 0, shard, replica)
              for site in ("paris", "lyon") for shard in (0, 1) for replica in (0, 1)]  # fmt: skip
    seeds = [random_seed(config(seed), place) for seed in (0, 1) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [random_seed(config(seed), place) for seed in (0, 1) for place in places]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_rank_draws_from_its_own_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much was drawn while its model was built, and whatever the process has inherited."""

    def build(*_: object, **__: object) -> str:
        torch.rand(7)
        return "rank"

    monkeypatch.setattr(rank, "build_rank", build)
    place = RankPlace("lyon", 0, 1)
    job = cast(Any, RankJob)(config(3), place, "", None, None, "", None, 0, 2, False, None)
    drawn = []
    with torch.random.fork_rng(devices=[]):
        monkeypatch.setattr(rank.dist, "FileStore", lambda *_: None)
        for inherited in (1, 2):
            torch.manual_seed(inherited)
            built: Any = rank._build(job, cast(Any, None), cast(Any, _Limits()), lambda: None)
            assert built == "rank"
            drawn.append(torch.rand(3).tolist())
        assert torch.initial_seed() == random_seed(job.config, place)
    assert drawn[0] == drawn[1]


class _Limits:
    stall = 1.0
