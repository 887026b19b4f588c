"""The arguments of a rank's process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.identity import Identity
from dilocox.training.builder import Hooks, RankPlace
from dilocox.training.launch import site_log


@dataclass(frozen=True)
class RankJob:
    """The arguments of a rank's process."""

    config: RunConfig
    place: RankPlace
    url: str
    identity: Identity
    hooks: Hooks
    address: str
    """Interface name or IP address that the exchange binds to."""
    meeting: str | dist.Store | None
    """File or store in which the site's ranks meet. May be None: the rank is alone."""
    local_rank: int
    """Number of this rank among the ranks on this machine."""
    ranks_here: int
    """Number of ranks that share this machine's GPUs, and this rank's cores."""
    shared_folder: bool
    """Whether all sites of the run write to the same run folder. Otherwise those do that have
    joined from it (`dilocox.training.one_folder`)."""
    log_file: Path | None
    """File for the rank's output. None leaves the output where it is."""
    debug: bool = False
    trace: Path | None = None
    """File for the rank's timeline. None records no timeline."""
    tell: site_log.Say | None = None
    """Gets a line per event and round. None if another process shows the run."""


STOPPED = 130
"""Exit code of a rank to which the coordinator has said that the run is stopped already."""
