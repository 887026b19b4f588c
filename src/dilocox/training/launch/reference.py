"""Reference log-probabilities of preference training, computed once when the data are prepared.

The reference is the model that the run starts from, with the adapters of `adapter.path` if there
are any. Its log-probabilities are a column of the token files, so no process of the run holds a
second model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dilocox.config.model import ModelSection
from dilocox.config.preference import REFERENCE
from dilocox.config.run_config import RunConfig
from dilocox.data import TokenFiles
from dilocox.data.columns import COLUMN_DTYPE
from dilocox.data.flags import COUNTED, SECOND, STARTS
from dilocox.data.packing import ShardFile, column_file
from dilocox.data.token_files import SPLITS
from dilocox.errors import DataError, ModelError
from dilocox.inner.device import resolve_device, resolve_precision
from dilocox.inner.loss import log_likelihoods
from dilocox.models.adapter_weights import AdapterWeights
from dilocox.models.architecture import load_model_config, one_line
from dilocox.models.base_weights import base_digest
from dilocox.models.hf_weights import locate_weights
from dilocox.models.network import load_network
from dilocox.models.start_adapters import add_adapters, start_digest

LOGITS = 2**27
"""Most logits that are computed at once."""
Progress = Callable[[str, float], None]
Numbers = npt.NDArray[np.int64]


def add_reference(
    config: RunConfig, folder: Path, content: dict[str, Any], progress: Progress
) -> None:
    """Write the reference's column beside token files of pairs, and name both in `content`.

    Args:
        config: the run, whose `[model]` and `adapter.path` are the reference.
        folder: folder of the token files, which are not published yet.
        content: content of their manifest, which is changed.
        progress: is called with the name of the step and the finished fraction, 0 to 1.

    Raises:
        ModelError: if the model cannot be read or loaded.
    """
    files = TokenFiles(folder, {"content": content, "digest": ""})
    place = locate_weights(str(config.model.path), config.model.revision)
    device = resolve_device(config.site)
    precision = resolve_precision(config.site, device)
    model = _reference(config, place, precision).to(device)
    total, done = sum(files.token_count(split) for split in SPLITS), 0
    for split in SPLITS:
        values = np.zeros(files.token_count(split), dtype=COLUMN_DTYPE)
        for start, length, found in _documents(files, split, model, device):
            values[start : start + length] = found
            progress("computing the reference", (done + start) / total)
        done += len(values)
        _write(folder, content["splits"][split]["shards"], values)
    content[REFERENCE] = {
        "model": base_digest(place),
        **_digest(config, place),
        "precision": str(precision).split(".")[1],
    }


def _first_adapters(config: RunConfig, place: Path) -> AdapterWeights | None:
    """Return the adapters of `adapter.path`, for the model in folder `place`; None without them."""
    if config.adapter is None or config.adapter.path is None:
        return None
    hf_config = load_model_config(ModelSection(path=str(place)), None)
    stored = Path(config.adapter.path).expanduser()
    return AdapterWeights(hf_config, config.adapter, config.run.seed, None, stored)


def _digest(config: RunConfig, place: Path) -> dict[str, str]:
    """Return the digest of the reference's adapters; nothing if it has none."""
    found = _first_adapters(config, place)
    if found is None or config.adapter is None:
        return {}
    return {"adapters": start_digest(found, config.adapter)}


def _reference(config: RunConfig, place: Path, precision: torch.dtype) -> Any:
    """Returns the model in folder `place`, on the CPU and in evaluation mode.

    It has the first adapters of the run if `adapter.path` names some. Raises `ModelError` if it
    cannot be loaded.
    """
    try:
        model = load_network(place, None, precision)
    except Exception as error:  # transformers raises many kinds of errors here
        raise ModelError(
            f"model.path {config.model.path}: cannot be loaded as the reference of preference "
            f"training ({one_line(error)}); name a whole model that transformers can load"
        ) from None
    found = _first_adapters(config, place)
    if found is not None and config.adapter is not None:
        add_adapters(model, found, config.adapter, precision)
    return model.eval()


def check_reference(config: RunConfig, files: TokenFiles) -> None:
    """Raise `DataError` if the reference was computed with another model than the run's."""
    reference = files.content.get(REFERENCE, {})
    place = locate_weights(str(config.model.path), config.model.revision)
    begun, here = reference.get("model"), base_digest(place)
    if begun != here:
        raise DataError(
            f"{files.folder}: its reference log-probabilities are of the model with digest "
            f"{str(begun)[:12]}…, and model.path {config.model.path} has {here[:12]}…; set "
            "data.folder to another folder or delete this one, or name that model"
        )
    # A run that goes on keeps the reference of the earlier run, whose token files it must have.
    if config.handover is not None:
        return
    if reference.get("adapters") != _digest(config, place).get("adapters"):
        raise DataError(
            f"{files.folder}: its reference log-probabilities are of other adapters than "
            "adapter.path holds; set data.folder to another folder or delete this one, or name "
            "those adapters"
        )


def _documents(
    files: TokenFiles, split: str, model: Any, device: torch.device
) -> Iterator[tuple[int, int, npt.NDArray[np.float32]]]:
    """Yield (offset, tokens, log-probability of each counted token) of every answer of a split."""
    flags, tokens = files.flags(split), files.tokens(split)
    assert flags is not None
    starts = flags.places_with(STARTS | SECOND)
    lengths = np.diff(np.append(starts, len(flags)))
    most = getattr(model.config, "max_position_embeddings", None) or int(lengths.max())
    for some in _batches(lengths, max(1, LOGITS // model.config.vocab_size)):
        # An answer that is longer than the model's positions is in no row.
        some = some[lengths[some] <= most]
        if not len(some):
            continue
        ids = np.zeros((len(some), int(lengths[some].max())), dtype=np.int64)
        labels = np.full_like(ids, -1)
        for row, number in enumerate(some.tolist()):
            at, length = starts[number : number + 1], int(lengths[number])
            ids[row, :length] = tokens.gather(at, length)[0]
            counts = (flags.gather(at, length)[0] & COUNTED) > 0
            labels[row, :length] = np.where(counts, ids[row, :length], -1)
        given, wanted = (torch.from_numpy(each).to(device) for each in (ids, labels))
        # Padding is behind the tokens, which do not see it.
        with torch.no_grad():
            logits = model(given[:, :-1], use_cache=False).logits
            found = log_likelihoods(logits, wanted[:, 1:]).cpu().numpy()
        for row, number in enumerate(some.tolist()):
            length = int(lengths[number])
            yield int(starts[number]), length, np.append([0.0], found[row, : length - 1])


def _batches(lengths: Numbers, most: int) -> Iterator[Numbers]:
    """Yield consecutive numbers of documents that, padded, have at most `most` tokens together."""
    first, longest = 0, 0
    for number, length in enumerate(lengths.tolist()):
        if number > first and max(longest, length) * (number + 1 - first) > most:
            yield np.arange(first, number)
            first, longest = number, 0
        longest = max(longest, length)
    if first < len(lengths):
        yield np.arange(first, len(lengths))


def _write(folder: Path, shards: list[dict[str, Any]], values: npt.NDArray[Any]) -> None:
    at = 0
    for shard in shards:
        name = column_file(Path(shard["file"]).stem, REFERENCE)
        file = ShardFile(folder / name)
        file.write(values[at : at + shard["tokens"]])
        shard["columns"] = {REFERENCE: {"file": name, "sha256": file.close()}}
        at += shard["tokens"]
