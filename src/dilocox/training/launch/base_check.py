"""Checks that a run with adapters goes on with the base model that they were trained on."""

from __future__ import annotations

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.event_log import NAME, EventLog
from dilocox.errors import TrainingError
from dilocox.models.prefetch import digest_of_base
from dilocox.training.portable_checkpoint import Handover


def check_base(config: RunConfig) -> None:
    """Check the base model of the run in `config.folder` before its processes start.

    Does nothing if the run has no adapters. If no site had enrolled yet, only the base model of
    handed over adapters is compared. Sites at other places are checked when they enrol. Raises
    `TrainingError` for another base model than the run was begun with, `ConfigError` for another
    one than that of handed over adapters, and `ModelError` if it cannot be read.
    """
    if config.adapter is None:
        return
    begun = _digest_of_run(config)
    here = digest_of_base(config)
    if config.handover is not None:
        Handover.read(config.handover).check_base(config, here)
    if begun is not None and here is not None and here != begun:
        raise TrainingError(
            f"model.path {config.model.path}: base model with digest {here[:12]}…, but the run in "
            f"{config.folder} was begun with {begun[:12]}…; put that model back, or set "
            "model.revision to its commit"
        )


def _digest_of_run(config: RunConfig) -> str | None:
    """Return the digest that the first site named; None if none has."""
    folder = config.folder / "coordinator"
    if not (folder / NAME).is_file():
        return None
    log = EventLog(folder)
    try:
        named = (event.base_digest for event in log.events() if isinstance(event, e.Enrolled))
        return next((digest for digest in named if digest is not None), None)
    finally:
        log.close()
