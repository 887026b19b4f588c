"""The handover of one run to another: a folder with model, outer momentum and place in the data.

The folder is a Hugging Face folder (the anchor, fp32), or of a run with adapters a PEFT folder
(their anchor, fp32). It also holds the outer momentum, as whole tensors by full name, and
`handover.json`, which is written last. It does not depend on sites, stages or shards, so a run with
other sites, stages or shards can continue from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dilocox.config.handover import FILE, MOMENTUM
from dilocox.config.run_config import RunConfig
from dilocox.errors import CheckpointError, ConfigError
from dilocox.utils.adapter_files import ADAPTER_FILE
from dilocox.utils.storage import sha256_of

Count = Annotated[int, Field(ge=0)]


OF_ADAPTERS = ("kind", "rank", "alpha", "targets", "use_rslora", "freeze_a")
"""Keys of `[adapter]` that the run which goes on must have in common with the earlier run."""


class HandedAdapters(BaseModel):
    """What `handover.json` says of adapters that an earlier run has trained."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    weights: str
    """SHA-256 of `adapter_model.safetensors`."""
    base: str
    """Digest of the base model (`dilocox.models.base_weights`)."""
    settings: dict[str, Any]
    """Section `[adapter]` of the earlier run."""


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
    adapters: HandedAdapters | None = None
    """What is known of the adapters, if the earlier run trained adapters alone."""

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
                "`dilocox handover` has written in model.path, and a run with [adapter] in "
                "adapter.handover"
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
        content = self.model_dump(exclude={"adapters"} if self.adapters is None else None)
        part.write_text(json.dumps(content, sort_keys=True) + "\n", encoding="utf-8")
        part.replace(folder / FILE)

    def check_momentum(self, folder: str | Path) -> Path:
        """Return the path of the file with the outer momentum, after checking its digest.

        The adapters' file is checked, too. Raises `CheckpointError` if a file is missing or was
        changed.
        """
        path = Path(folder).expanduser() / MOMENTUM
        digests = {path: self.momentum}
        if self.adapters is not None:
            digests[path.with_name(ADAPTER_FILE)] = self.adapters.weights
        for file, digest in digests.items():
            if not file.is_file() or sha256_of(file) != digest:
                raise CheckpointError(
                    f"{file}: missing or changed since it was handed over; copy the folder again"
                )
        return path

    def check_run(self, config: RunConfig) -> None:
        """Raise `ConfigError` if the run of `config` cannot continue from this handover.

        Token files are not checked here.
        """
        self._check_adapters(config)
        if config.exchanges_gradients:
            raise ConfigError(
                f"{self.key}: method {config.outer.method} exchanges gradients and has no "
                f"outer state to go on from: {self.without}"
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
                    f"{self.key}: {what} is {now}, but run {self.run} had {before}; token "
                    f"ranges would name other text: use the same value, or {self.without}"
                )

    def _check_adapters(self, config: RunConfig) -> None:
        """Raise `ConfigError` unless this run trains what the earlier run trained."""
        now = config.adapter
        if self.adapters is None and now is not None:
            raise ConfigError(
                f"adapter.handover {now.handover}: run {self.run} trained no adapters, but all "
                "parameters; name its folder in model.path with model.handover = true, without "
                "[adapter]"
            )
        if self.adapters is None or now is None:
            if self.adapters is not None:
                raise ConfigError(
                    f"model.path {config.model.path}: run {self.run} handed over adapters alone; "
                    "name the folder in adapter.handover, and the base model in model.path"
                )
            return
        same = now.model_dump(mode="json", include=set(OF_ADAPTERS))
        for key in OF_ADAPTERS:
            before = self.adapters.settings.get(key)
            if same[key] != before:
                raise ConfigError(
                    f"adapter.{key}: {same[key]}, but run {self.run} had {before}; use the same "
                    f"value, or {self.without}"
                )

    def check_base(self, config: RunConfig, digest: str | None) -> None:
        """Raise `ConfigError` if the base model here is not the one of the handed over adapters.

        `digest`: of the base model here; None without adapters.
        """
        if self.adapters is not None and digest != self.adapters.base:
            raise ConfigError(
                f"model.path {config.model.path}: base model with digest {str(digest)[:12]}…, but "
                f"run {self.run} trained its adapters on {self.adapters.base[:12]}…; name that "
                "base model, or set model.revision to its commit"
            )

    @property
    def key(self) -> str:
        """Key of the run file with which a run goes on from this handover."""
        return "model.handover" if self.adapters is None else "adapter.handover"

    @property
    def without(self) -> str:
        """How a user begins anew instead, for the end of an error's message."""
        return "set handover = false" if self.adapters is None else "remove adapter.handover"

    @property
    def line(self) -> str:
        """One line for users that says which state is continued and which is not."""
        return (
            f"goes on from run {self.run} after {self.steps} inner steps: "
            f"{'anchor' if self.adapters is None else 'anchor of the adapters'}, outer momentum "
            "and token ranges are taken over; residuals, inner moments and exchanges that had "
            "not landed yet (a round at most) are not"
        )


def check_handover(config: RunConfig) -> None:
    """Check that the run can continue from its handover, without a look at token files.

    Does nothing if the run file names no handover. The outer momentum is not read, see
    `check_handed_momentum`. Raises `ConfigError` if the run cannot continue from the handover, and
    `CheckpointError` if the handover cannot be read.
    """
    if config.handover is not None:
        Handover.read(config.handover).check_run(config)


def check_handed_momentum(config: RunConfig) -> None:
    """Check the digest of the outer momentum from which the run continues, by reading the file.

    With adapters, their file is checked, too. Does nothing if the run file names no handover.
    Raises `CheckpointError` if a file is missing or damaged.
    """
    if config.handover is not None:
        Handover.read(config.handover).check_momentum(config.handover)
