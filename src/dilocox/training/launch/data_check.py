"""Checks of the run's token files, after they have been prepared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dilocox.config.preference import REFERENCE
from dilocox.config.run_config import RunConfig
from dilocox.data import SequenceSpace, TokenFiles
from dilocox.errors import ConfigError, DataError
from dilocox.training.launch.tokenizer_check import read_vocabulary
from dilocox.training.portable_checkpoint import Handover
from dilocox.training.site_text import own_token_files
from dilocox.utils.template_files import TEMPLATE_FILE


def check_data(
    config: RunConfig, files: TokenFiles, sites: Sequence[str], own_dataset: bool = False
) -> None:
    """Raise `DataError` or `ConfigError` for token files that `sites` cannot train on.

    `files`: the token files that all sites share. With `own_dataset` sequences come from the
    user's function, so only the tokenizers of the sites' own token files are checked.
    """
    spaces: dict[str, TokenFiles] = {}
    for site in sites:
        own = own_token_files(config, site)
        spaces[site] = files if own is None else own
        if own is not None:
            _check_same_tokenizer(site, files, spaces[site])
            _check_same_conversations(site, files, spaces[site])
    if own_dataset:
        return
    for site in sites:
        space = SequenceSpace.of(config.data, spaces[site], seed=config.run.seed)
        batch = config.site_batch(site)
        if config.outer.global_batch == "fixed":
            batch = config.global_batch  # the batch of a site that is the only one left
        if batch > space.sequences_per_epoch:
            private = config.sites[site].data or config.sites[site].batch_size
            key = f"sites.{site}.batch_size" if private else "site.batch_size"
            raise ConfigError(
                f"{key} {batch} is above the {space.sequences_per_epoch} sequences of "
                f"{spaces[site].folder}: lower it or data.sequence_length, or give more text"
            )


def _check_same_tokenizer(site: str, files: TokenFiles, own: TokenFiles) -> None:
    for what in ("vocabulary_size", "end_of_text"):
        if own.content[what] != files.content[what]:
            raise DataError(
                f"sites.{site}.data {own.folder}: its {what} is {own.content[what]}, the run's "
                f"{files.content[what]}; prepare it with data.tokenizer = "
                f'"{files.tokenizer_folder}"'
            )
    if own.has_flags != files.has_flags:
        has = {
            True: "has tokens that do not count as labels",
            False: "is text, all of which counts",
        }
        raise DataError(
            f"sites.{site}.data {own.folder}: {has[own.has_flags]}, but the run's data "
            f"{has[files.has_flags]}; prepare both with the same data.format"
        )
    # Pairs have a column and rules of their own, which other keys do not give.
    _check_same_key(site, files, own, "format")
    if own.column_names != files.column_names:
        raise DataError(
            f"sites.{site}.data {own.folder}: has the columns {own.column_names}, the run's data "
            f"{files.column_names}; prepare both with the same data.columns"
        )
    if own.content.get(REFERENCE) != files.content.get(REFERENCE):
        raise DataError(
            f"sites.{site}.data {own.folder}: its reference log-probabilities are of another "
            "model, adapters or precision than the run's; prepare it with the run's [model] and "
            "[adapter]"
        )
    # Digests of the files may differ, because a tokenizer changes when it is loaded and saved.
    ours, theirs = (each.tokenizer_folder / "tokenizer.json" for each in (own, files))
    if read_vocabulary(ours) != read_vocabulary(theirs):
        raise DataError(
            f"sites.{site}.data {own.folder}: made with another tokenizer than the run's; prepare "
            f'it with data.tokenizer = "{files.tokenizer_folder}"'
        )


def _check_same_conversations(site: str, files: TokenFiles, own: TokenFiles) -> None:
    """Raise `DataError` if a site's conversations are rendered or learned in another way."""
    for what in ("loss_on", "chat_template", "end_of_turn"):
        _check_same_key(site, files, own, what)
    written = [_template(each) for each in (own, files)]
    if written[0] != written[1]:
        raise DataError(
            f"sites.{site}.data {own.folder}: made with another chat template than the run's; "
            f'prepare it with data.chat_template = "{files.tokenizer_folder / TEMPLATE_FILE}"'
        )


def _check_same_key(site: str, files: TokenFiles, own: TokenFiles, what: str) -> None:
    """Raise `DataError` if the manifests' entries about conversations differ in key `what`."""
    ours, theirs = (each.content.get("conversations") or {} for each in (own, files))
    if ours.get(what) != theirs.get(what):
        raise DataError(
            f"sites.{site}.data {own.folder}: made with {what} {ours.get(what)!r}, the run's data "
            f"with {theirs.get(what)!r}; prepare it with the run's [data] keys"
        )


def _template(files: TokenFiles) -> str:
    file = files.tokenizer_folder / TEMPLATE_FILE
    used = "conversations" in files.content and file.is_file()
    return file.read_text(encoding="utf-8") if used else ""


def check_handed_data(config: RunConfig, files: TokenFiles) -> None:
    """Raise `ConfigError` for token files that differ from those of the handover's run."""
    found = Handover.read(config.handover)
    if files.digest == found.data_digest:
        return
    tokenizer = json.dumps(config.data.tokenizer)
    if _has_tokenizer_of(files, Path(str(config.handover)).expanduser()):
        cause = (
            "the tokenizer knows the same tokens, so most likely data.source or "
            f"data.validation_fraction differed in that run, or {tokenizer} was not the name in "
            "data.tokenizer"
        )
    else:
        cause = f"most likely data.tokenizer, here {tokenizer}, differed in that run"
    raise ConfigError(
        f"{found.key}: the token files' digest is {files.digest}, but run {found.run} had "
        f"{found.data_digest}, and token ranges would name other text; {cause}: set [data] as in "
        f"its run.toml, copy that run's data folder, or {found.without}"
    )


def _has_tokenizer_of(files: TokenFiles, model: Path) -> bool:
    """Return whether the token files' tokenizer has the tokens of the one in folder `model`."""
    ours, theirs = (place / "tokenizer.json" for place in (files.tokenizer_folder, model))
    return theirs.is_file() and read_vocabulary(theirs) == read_vocabulary(ours)
