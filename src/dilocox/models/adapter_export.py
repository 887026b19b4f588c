"""Writes the adapters of a run as a PEFT folder, which `PeftModel.from_pretrained` loads.

A rank of every stage writes the stage's adapters into a file of its own (`write_adapter_stage`).
Then one rank joins these files (`finish_adapter_folder`). The configuration is written last. A
folder without it is not finished, and PEFT does not load it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dilocox.config.adapter import AdapterSection
from dilocox.config.run_config import ModelSection
from dilocox.errors import CheckpointError
from dilocox.models.adapter import adapter_shapes, lora_config, target_names
from dilocox.models.architecture import one_line
from dilocox.models.export import (
    Published,
    copy_tokenizer,
    special_tokens,
    write_generation_config,
)
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_KEYS = (
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "revision",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
)
"""Keys of the configuration that every release of PEFT since 0.9 reads. Others keep their
defaults, so that sites with different releases publish the same bytes."""
_STAGES = ".adapter-stage-*.safetensors"
"""Files of stages, which are hidden so that no loader takes them for a model's."""


def write_adapter_stage(
    folder: Path, stage: int, tensors: Mapping[str, torch.Tensor], form: Published
) -> None:
    """Write the adapters of one stage into a folder that is not finished yet, atomically.

    Args:
        folder: the folder; it is created if there is none.
        stage: number of the stage.
        tensors: the stage's whole adapters by PEFT's names, on the CPU; also those that are not
            trained.
        form: form of the published tensors.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    path = folder / _STAGES.replace("*", f"{stage:05d}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _save({name: form.converted(each.detach().cpu()) for name, each in tensors.items()}, path)
    except OSError as error:
        raise _not_written(path, error) from None


def finish_adapter_folder(
    folder: Path,
    hf_config: PretrainedConfig,
    model: ModelSection,
    adapter: AdapterSection,
    tokenizer_folder: Path | None,
    ends_of_turn: Sequence[int] = (),
) -> None:
    """Join the files of all stages, and complete the folder so that PEFT can load it.

    Args:
        folder: folder with the files of all stages.
        hf_config: configuration of the base model.
        model: section `[model]` of the run file, which names the base model.
        adapter: section `[adapter]` of the run file.
        tokenizer_folder: folder of the tokenizer; None if none is published.
        ends_of_turn: tokens that end a message of the assistant. If there are any, the folder gets
            a `generation_config.json` with them: the base model's own may not have them, and a
            model that is merged from the folder must stop there.

    Raises:
        CheckpointError: if an adapter is missing or unknown, or if a file cannot be read or
            written.
    """
    parts = sorted(folder.glob(_STAGES))
    tensors = _joined(parts)
    shapes = adapter_shapes(hf_config, adapter)
    for name in sorted(tensors.keys() ^ shapes.keys()):
        where = "is in no stage's file" if name in shapes else "is not an adapter of the model"
        raise CheckpointError(f"{folder}: {name} {where}; write the checkpoint again")
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".finish-") as name:
            work = Path(name)
            if tokenizer_folder is not None:
                copy_tokenizer(tokenizer_folder, work)
            if ends_of_turn:
                special = special_tokens(tokenizer_folder, ends_of_turn)
                write_generation_config(work, hf_config, hf_config, special, model.revision)
            _save({name: tensors[name] for name in shapes}, work / ADAPTER_FILE)
            config = adapter_config(hf_config, model, adapter)
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            for file in sorted(work.iterdir()):
                os.replace(file, folder / file.name)
            (work / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
            os.replace(work / ADAPTER_CONFIG, folder / ADAPTER_CONFIG)
        for part in parts:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise _not_written(folder, error) from None


def adapter_config(
    hf_config: PretrainedConfig, model: ModelSection, adapter: AdapterSection
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    The content is the same at all sites: no version is named, and the base model is named as in the
    run file.
    """
    names = target_names(hf_config, adapter)
    config = lora_config(
        adapter, names, base_model_name_or_path=model.path, revision=model.revision
    )
    # The folder is loaded to compute with; PEFT sets the key when it saves, too.
    content: dict[str, Any] = {
        **config.to_dict(),
        "target_modules": list(names),
        "inference_mode": True,
    }
    return {key: _plain(content.get(key)) for key in _KEYS}


def _plain(value: Any) -> Any:
    """Return a value of PEFT's configuration in a form that JSON has."""
    return str(value.value) if isinstance(value, Enum) else value


def _joined(parts: list[Path]) -> dict[str, torch.Tensor]:
    """Return the tensors of all stages' files. Raises `CheckpointError` if one cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for part in parts:
        try:
            tensors |= load_file(part)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{part}: cannot be read ({one_line(error)}); write the checkpoint again"
            ) from None
    return tensors


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file atomically. Raises `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.part")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        # The library creates files that only their owner, and so no web server, can read.
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(one_line(error)) from None
    finally:
        temporary.unlink(missing_ok=True)


def _not_written(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be written ({one_line(error)}); free disk space or choose another folder"
    )
