"""The handover of one run to another: a folder with model, outer momentum and place in the data.

The folder is a Hugging Face folder (the anchor, fp32). It also holds the outer momentum, as whole
tensors by full name, and `handover.json`, which is written last. It does not depend on sites,
stages or shards, so a run with other sites, stages or shards can continue from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dilocox.config.handover import FILE, MOMENTUM
from dilocox.config.run_config import RunConfig
from dilocox.errors import CheckpointError, ConfigError
from dilocox.utils.storage import sha256_of

Count = Annotated[int, Field(ge=0)]


class Handover(BaseModel):
    """The content of `handover.json`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    run: str
    """Name of the earlier run."""
    tick: Count
    """Number of finished slots of the earlier run."""
    steps: Count
    """Inner steps that the typical site of the earlier run had taken."""
    seed: int
    sequence_length: Count
    data_digest: str
    """Digest of the token files that the earlier run's sites share."""
    momentum: str
    """SHA-256 of the file with the outer momentum."""
    ledger: dict[str, Any]
    """Token ranges that were trained on, and ranges that will be given out again; see `Ledger`."""
    tokenizer: str = ""
    """`data.tokenizer` of the earlier run. Empty if it is not known."""
    vocabulary_size: Count = 0
    """`data.vocabulary_size` of the earlier run: the size of a tokenizer that it trained."""

    @classmethod
    def read(cls, folder: str | Path | None) -> Handover:
        """Read the handover from a folder that `dilocox handover` has written.

        Raises `CheckpointError` if the file cannot be read or is not valid.
        """
        path = Path(folder or "").expanduser() / FILE
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error.strerror}); model.handover needs a folder that "
                "`dilocox handover` has written in model.path"
            ) from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "file"
            raise CheckpointError(
                f"{path}: {where}: {first['msg']}; write the folder again with this version"
            ) from None

    def write(self, folder: Path) -> None:
        """Write `handover.json` into `folder`, after all other files."""
        part = folder / f".{FILE}.part"
        part.write_text(json.dumps(self.model_dump(), sort_keys=True) + "\n", encoding="utf-8")
        part.replace(folder / FILE)

    def check_momentum(self, folder: str | Path) -> Path:
        """Return the path of the file with the outer momentum, after checking its digest.

        Raises `CheckpointError` if the file is missing or was changed.
        """
        path = Path(folder).expanduser() / MOMENTUM
        if not path.is_file() or sha256_of(path) != self.momentum:
            raise CheckpointError(
                f"{path}: missing or changed since it was handed over; copy the folder again"
            )
        return path

    def check_run(self, config: RunConfig) -> None:
        """Raise `ConfigError` if the run of `config` cannot continue from this handover.

        Token files are not checked here.
        """
        if config.exchanges_gradients:
            raise ConfigError(
                f"model.handover: method {config.outer.method} exchanges gradients and has no "
                "outer state to go on from: set handover = false"
            )
        if config.total_steps <= self.steps:
            raise ConfigError(
                f"outer: the run file asks for {config.total_steps} inner steps in all, and run "
                f"{self.run} has taken {self.steps} already; raise outer.rounds or outer.steps"
            )
        same = {
            "run.seed": (config.run.seed, self.seed),
            "data.sequence_length": (config.data.sequence_length, self.sequence_length),
        }
        for what, (now, before) in same.items():
            if now != before:
                raise ConfigError(
                    f"model.handover: {what} is {now}, but run {self.run} had {before}; token "
                    "ranges would name other text: use the same value, or set handover = false"
                )

    @property
    def line(self) -> str:
        """One line for users that says which state is continued and which is not."""
        return (
            f"goes on from run {self.run} after {self.steps} inner steps: anchor, outer momentum "
            "and token ranges are taken over; residuals, inner moments and exchanges that had "
            "not landed yet (a round at most) are not"
        )


def check_handover(config: RunConfig) -> None:
    """Check that the run can continue from its handover, without a look at token files.

    Does nothing if the run file names no handover. The outer momentum is not read, see
    `check_handed_momentum`. Raises `ConfigError` if the run cannot continue from the handover, and
    `CheckpointError` if the handover cannot be read.
    """
    if config.model.handover:
        Handover.read(config.model.path).check_run(config)


def check_handed_momentum(config: RunConfig) -> None:
    """Check the digest of the outer momentum from which the run continues, by reading the file.

    Does nothing if the run file names no handover. Raises `CheckpointError` if the momentum is
    missing or damaged.
    """
    if config.model.handover:
        Handover.read(config.model.path).check_momentum(str(config.model.path))
