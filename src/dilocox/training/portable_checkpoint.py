"""What one run hands over to another: a folder with model, outer momentum and place in the data.

The folder is a Hugging Face one (the anchor, fp32), with the outer momentum beside it, whole
tensors by full name, and `handover.json`, written last. It does not depend on sites, stages or
shards, so that a run with others can go on from it.
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
    """`handover.json`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    run: str
    """Name of the run that this comes from."""
    tick: Count
    """Slots of it that had ended."""
    steps: Count
    """Inner steps that its typical site had taken."""
    seed: int
    sequence_length: Count
    data_digest: str
    """Of the token files that its sites share."""
    momentum: str
    """SHA-256 of the file with the outer momentum."""
    ledger: dict[str, Any]
    """Token ranges that were trained on, and those to be given out again; see `Ledger`."""
    tokenizer: str = ""
    """`data.tokenizer` of that run; empty: not known."""
    vocabulary_size: Count = 0
    """`data.vocabulary_size` of that run, which a trained tokenizer goes by."""

    @classmethod
    def read(cls, folder: str | Path | None) -> Handover:
        """From a folder that `dilocox handover` has written. Raises `CheckpointError`."""
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
        """Write it into `folder`, as the last of its files."""
        part = folder / f".{FILE}.part"
        part.write_text(json.dumps(self.model_dump(), sort_keys=True) + "\n", encoding="utf-8")
        part.replace(folder / FILE)

    def check_momentum(self, folder: str | Path) -> Path:
        """The file with the momentum. Raises `CheckpointError` if it is not the one handed over."""
        path = Path(folder).expanduser() / MOMENTUM
        if not path.is_file() or sha256_of(path) != self.momentum:
            raise CheckpointError(
                f"{path}: missing or changed since it was handed over; copy the folder again"
            )
        return path

    def check_run(self, config: RunConfig) -> None:
        """Raise `ConfigError` for a run that cannot go on from here, whatever its token files."""
        if config.exchanges_gradients:
            raise ConfigError(
                f"model.handover: method {config.outer.method} exchanges gradients and has no "
                "outer state to go on from: set handover = false"
            )
        if config.total_steps <= self.steps:
            raise ConfigError(
                f"outer: {config.total_steps} inner steps in all, of which run {self.run} has "
                f"taken {self.steps}; raise outer.rounds or outer.steps"
            )
        same = {
            "run.seed": (config.run.seed, self.seed),
            "data.sequence_length": (config.data.sequence_length, self.sequence_length),
        }
        for what, (now, before) in same.items():
            if now != before:
                raise ConfigError(
                    f"model.handover: {what} is {now}, of run {self.run} it was {before}; token "
                    "ranges would name other text: use the same, or set handover = false"
                )

    @property
    def line(self) -> str:
        """What goes on and what does not, in one line."""
        return (
            f"goes on from run {self.run} after {self.steps} inner steps: anchor, outer momentum "
            "and token ranges are taken over; residuals, inner moments and what had not landed "
            "yet (a round at most) are not"
        )


def check_handover(config: RunConfig) -> None:
    """Refuse a run that cannot go on from its handover, as far as no token files are needed.

    Nothing for a run that begins anew. Raises `ConfigError`, and `CheckpointError` for a handover
    that is missing or damaged.
    """
    if config.model.handover:
        found = Handover.read(config.model.path)
        found.check_run(config)
        found.check_momentum(str(config.model.path))
