"""`dilocox export RUN --release DIR`: writes a run's model as a signed folder.

The folder is written whole or not at all.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from dilocox.data.croissant import CROISSANT, render_croissant
from dilocox.errors import CheckpointError, ConfigError
from dilocox.record.verify.release_signature import key_beside
from dilocox.tools.release.card import Terms, card
from dilocox.tools.release.signature import (
    check_installed,
    fingerprint,
    public_pem,
    sign,
    signing_key,
)
from dilocox.tools.report.folder import read_run
from dilocox.tools.report.page import build
from dilocox.training.run_model import check_plain_folder, export, model_folder

KEY = "release-key.pem"
"""Name of the default signing key. It lies in the coordinator's folder, which is never published.
"""


@dataclass(frozen=True)
class Release:
    """A release that was written."""

    folder: Path
    public_key: Path
    """File of the public key. It lies beside the folder, not in it, because whoever checks the
    signature must get the key from another source."""
    unknown: tuple[str, ...]
    """One line per fact that is missing in the model card."""


def release(
    run: Path,
    to: Path,
    *,
    dtype: str = "fp32",
    licence: str | None = None,
    key: Path | None = None,
    model: Path | None = None,
    data: Path | None = None,
) -> Release:
    """Write a run's model with a model card, a description of its data, and a signature.

    Args:
        run: Run folder of the coordinator.
        to: Folder to write; it must be empty or not exist.
        dtype: `fp32`, `bf16` or `fp16`.
        licence: Licence of the weights, as their owner states it. May be None.
        key: PEM file of the private EC key; it is created if it does not exist. None: a key in
            the coordinator's folder.
        model: Folder of the published model. None: it is in `run`.
        data: Folder of the token files. None: it is in `run`.

    Raises:
        DilocoxError: The release cannot be written or signed.
    """
    check_installed()
    files = read_run(run, model, data)
    if key is None:
        if not (run / "coordinator").is_dir():
            raise ConfigError(
                f"{run}: the coordinator's folder is not here; give the key with --signing-key"
            )
        key = run / "coordinator" / KEY
    private = signing_key(key)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise CheckpointError(f"{to}: is not empty; choose another folder")
    page = build(files, time.time())
    terms = Terms(dtype, licence, fingerprint(private))
    partial = to.with_name(f".{to.name}.release")
    public = key_beside(to)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _copy(model or run, partial, dtype)
        (partial / "README.md").write_text(card(page, files, terms), encoding="utf-8")
        if files.data is not None:
            text = render_croissant(files.data["content"])
            (partial / CROISSANT).write_text(text, encoding="utf-8")
        sign(partial, key)
        public.write_bytes(public_pem(private))
        partial.replace(to)
    except OSError as error:
        raise CheckpointError(
            f"{to}: cannot be written ({error.strerror or error}); choose another folder"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    unknown = list(files.missing)
    if licence is None:
        unknown.append("licence of the weights: not stated (--licence)")
    unknown += [
        f"licence of {source.name}: not stated (data.licence)"
        for source in page.sources
        if not source.licence
    ]
    return Release(to, public, tuple(unknown))


def _copy(run: Path, target: Path, dtype: str) -> None:
    """Copy the model of a run, or a model's folder, to `target`.

    In fp32 the files are copied byte for byte, so that the record's claims hold for the copy.
    """
    if dtype != "fp32":
        export(run, target, dtype)
        return
    target.mkdir(parents=True)
    check_plain_folder(model_folder(run))
    for path in model_folder(run).iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, target / path.name)
            # Earlier versions published weights that only their owner can read.
            (target / path.name).chmod(0o644)
