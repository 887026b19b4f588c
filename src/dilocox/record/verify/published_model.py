"""Compares the tensors of a published folder with the signed ones: a whole model, or adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.errors import RecordError
from dilocox.record.log.digests import TensorDigest

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[str, float], None]


def compare_model(
    folder: Path, signed: Sequence[TensorDigest], progress: Progress
) -> tuple[int, list[str]]:
    """Compare the tensors of a Hugging Face folder with the `signed` ones.

    Returns the number of signed tensors, and the names of unsigned buffers. Raises `RecordError`
    if a tensor differs, or if a parameter is not signed.
    """
    from dilocox.config.run_config import ModelSection
    from dilocox.models import load_model_config
    from dilocox.models.hf_weights import PretrainedWeights, stored_names
    from dilocox.record.log.digests import tensor_digest
    from dilocox.record.verify.model_weights import check_weights
    from dilocox.utils.rounding import is_bf16, round_to_bf16

    check_weights(folder, stored_names(folder))
    weights = PretrainedWeights(folder, load_model_config(ModelSection(path=str(folder)), None))
    if weights.strays:
        raise RecordError(f"{folder}: holds {weights.strays[0]}, not a tensor of the model")
    for number, each in enumerate(signed):
        progress("comparing the model", number / len(signed))
        found = weights.tensor(each.name)
        if each.dtype == "bfloat16" and is_bf16(found):
            found = round_to_bf16(found)
        if tensor_digest(each.name, found) != each:
            raise RecordError(f"{folder}: {each.name} is not the one that was signed")
    known = {each.name for each in signed}
    unsigned = [name for name in weights.names if name not in known]
    trained = [name for name in unsigned if name in weights.parameters]
    if trained:
        more = f" (and {len(trained) - 1} more)" if len(trained) > 1 else ""
        raise RecordError(f"{folder}: nobody has signed {trained[0]}{more}")
    return len(signed), unsigned


def compare_tensors(folder: Path, signed: Sequence[TensorDigest], progress: Progress) -> int:
    """Compare the tensors of a model of users' own loops with the `signed` ones.

    Returns their number. Raises `RecordError` if a tensor differs, is missing or is not signed, or
    if the folder holds other weights.
    """
    from safetensors import SafetensorError, safe_open

    from dilocox.models.hf_weights import SINGLE_FILE
    from dilocox.record.log.digests import tensor_digest
    from dilocox.record.verify.model_weights import check_tensors

    path = folder / SINGLE_FILE
    if not path.is_file():
        raise RecordError(f"{path}: missing")
    check_tensors(folder, {each.name for each in signed})
    try:
        with safe_open(path, framework="pt") as file:
            for number, each in enumerate(signed):
                progress("comparing the model", number / len(signed))
                if tensor_digest(each.name, file.get_tensor(each.name)) != each:
                    raise RecordError(f"{path}: {each.name} is not the one that was signed")
    except (OSError, SafetensorError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from None
    return len(signed)


def compare_adapters(
    folder: Path, signed: Sequence[TensorDigest], seed: int | None, progress: Progress
) -> int:
    """Compare the adapters of a PEFT folder with the `signed` ones; return their number.

    `seed`: the run's seed, which gives every A if B alone was trained; None: both were trained.
    Raises `RecordError` if a tensor differs, is missing or is not signed, or if the folder holds
    other weights.
    """
    from safetensors import SafetensorError, safe_open

    from dilocox.models.adapter_weights import fixed_beside
    from dilocox.record.log.digests import tensor_digest
    from dilocox.record.verify.model_weights import check_adapter
    from dilocox.utils.adapter_files import ADAPTER_FILE

    path = folder / ADAPTER_FILE
    if not path.is_file():
        raise RecordError(f"{path}: missing")
    names = [each.name for each in signed]
    fixed = [] if seed is None else [fixed_beside(name) for name in names]
    check_adapter(folder, {*names, *fixed})
    try:
        with safe_open(path, framework="pt") as file:
            for number, each in enumerate(signed):
                progress("comparing the model", number / len(signed))
                if tensor_digest(each.name, file.get_tensor(each.name)) != each:
                    raise RecordError(f"{path}: {each.name} is not the one that was signed")
            for name, each in zip(fixed, signed, strict=seed is not None):
                if not _is_fixed(name, file.get_tensor(name), each, seed):
                    raise RecordError(f"{path}: {name} is not the one that run.seed = {seed} gives")
    except (OSError, SafetensorError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from None
    return len(signed)


def _is_fixed(name: str, found: Tensor, beside: TensorDigest, seed: int | None) -> bool:
    """Return True if `found` is the A of a seed, in the dtype and rank of the signed B `beside`."""
    from dilocox.models.adapter_weights import fixed_values
    from dilocox.utils.rounding import round_to_bf16

    assert seed is not None
    if found.dim() != 2 or found.shape[0] != beside.shape[1]:
        return False
    expected = fixed_values(name, found.shape, seed)
    if beside.dtype == "bfloat16":
        expected = round_to_bf16(expected)
    return found.dtype == expected.dtype and bool(found.equal(expected))
