"""Writes a model that is spread over stages as one Hugging Face folder.

A rank of every stage writes the stage's files into a new folder (`write_stage_file`). Then one rank
completes the folder (`finish_model_folder`). The index is written last. A folder without an index
is not finished, and transformers does not load it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dilocox.config.base import parse_bytes
from dilocox.config.run_config import RunConfig
from dilocox.errors import CheckpointError
from dilocox.models.architecture import one_line
from dilocox.models.hf_weights import INDEX_FILE, SINGLE_FILE, find_recipes
from dilocox.models.meta_model import build_skeleton, tied_names
from dilocox.utils.rounding import round_to_bf16
from dilocox.utils.template_files import TEMPLATE_FILE, TEMPLATES_FOLDER

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_STAGE_FILES = "model-*-of-*.safetensors"
_PART = "-part-"
"""Text before the part number in temporary file names, if a stage writes several files. The files
get their final names when the folder is finished."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
ENDS = "ends_of_turn"
"""Key of the tokens that end a message of the assistant, beside those of special tokens."""

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def stage_file_name(index: int, count: int) -> str:
    """Returns the file name of stage `index` (from 0) of `count` stages."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


@dataclass(frozen=True)
class Published:
    """Form in which a model is published: data type and size of files."""

    bf16: bool = False
    """Whether fp32 tensors are rounded to bf16, to nearest, ties to even."""
    file_bytes: int = 5 * 10**9
    """Largest size of the tensors in one file, in bytes. A larger tensor gets its own file."""

    @classmethod
    def of(cls, config: RunConfig) -> Published:
        """Returns the form that `[checkpoint]` of a run file asks for."""
        kept = config.checkpoint
        return cls(kept.published_dtype == "bf16", parse_bytes(kept.published_file_size))

    def converted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor as it is published: rounded if `bf16` is set, and contiguous."""
        tensor = tensor.contiguous()
        rounds = self.bf16 and tensor.dtype == torch.float32
        return round_to_bf16(tensor) if rounds else tensor

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Returns the size of a tensor as it is published, in bytes."""
        half = self.bf16 and tensor.dtype == torch.float32
        return tensor.numel() * (2 if half else tensor.element_size())


def write_stage_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    hf_config: PretrainedConfig,
    form: Published | None = None,
) -> None:
    """Write the tensors of one stage as safetensors. Each file is written atomically.

    Names and layout are those that `save_pretrained` would write. If the tensors do not fit into
    one file, they go into several files beside `path`, which `finish_model_folder` renames.

    Memory beside `tensors`: copies for one file, and copies of tensors that the model type joins or
    splits for storage.

    Args:
        path: file of the stage; see `stage_file_name`.
        tensors: unsharded tensors by full name. The second tensor of a tied pair is left out.
        hf_config: configuration of the model.
        form: form of the published model; None means `Published()`.

    Raises:
        CheckpointError: if a file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    form = form or Published()
    model = build_skeleton(hf_config)
    pair = tied_names(model)
    whole = {
        name: tensor.detach().cpu()
        for name, tensor in tensors.items()
        if pair is None or name != pair[1]
    }
    published = _published(model, whole)
    groups = _groups(published, form)
    files = [path] if len(groups) == 1 else [_part(path, number) for number in range(len(groups))]
    current = path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for current, names in zip(files, groups, strict=True):
            temporary = current.with_name(f".{current.name}.part")
            group = {name: form.converted(published.pop(name)) for name in names}
            # Tensors that were split from one tensor may share memory. safetensors refuses this.
            save_file(_unshared(group), temporary, metadata={"format": "pt"})
            # The library creates files that only their owner, and so no web server, can read.
            temporary.chmod(0o644)
            os.replace(temporary, current)
        for stale in {path, *path.parent.glob(f"{path.stem}{_PART}*{path.suffix}")} - {*files}:
            stale.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        current.with_name(f".{current.name}.part").unlink(missing_ok=True)
        raise CheckpointError(
            f"{current}: cannot be written ({one_line(error)}); free disk space or choose another "
            "folder"
        ) from None


def _part(path: Path, number: int) -> Path:
    """Returns the temporary path of one of several files of the stage with file `path`."""
    return path.with_name(f"{path.stem}{_PART}{number + 1:05d}{path.suffix}")


def _groups(tensors: Mapping[str, torch.Tensor], form: Published) -> list[list[str]]:
    """Returns the names of the tensors of each file, in order."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        own = form.bytes_of(tensor)
        if groups[-1] and size + own > form.file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    return groups


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], form: Published) -> None:
    """Write the tensors of a model that transformers does not know, as `model.safetensors`.

    The file is written atomically. Raises `CheckpointError` if it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = folder / SINGLE_FILE
    part = path.with_name(f".{path.name}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: form.converted(tensor) for name, tensor in tensors.items()}, part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from None


def finish_model_folder(
    folder: Path,
    hf_config: PretrainedConfig,
    tokenizer_folder: Path | None,
    revision: str | None = None,
    ends_of_turn: Sequence[int] = (),
) -> None:
    """Complete a folder of stage files, so that `from_pretrained` can load it.

    Writes config.json, generation_config.json and the index, and copies the tokenizer's files.

    Args:
        folder: folder with the files of all stages.
        hf_config: configuration of the model.
        tokenizer_folder: folder of the tokenizer; None if none is published.
        revision: revision of the hub model that the run started from. The generation settings of
            that model are kept.
        ends_of_turn: tokens that end a message of the assistant. Generation stops at them, too.

    Raises:
        CheckpointError: if a tensor of the model is missing, stored twice or unknown, or if a file
            cannot be read or written.
    """
    model = build_skeleton(hf_config)
    _name_parts(folder)
    stored, sizes, dtypes = _read_headers(folder)
    _check_complete(folder, model, stored)
    files: list[Path] = []
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".finish-") as name:
            work = Path(name)
            special = special_tokens(tokenizer_folder, ends_of_turn)
            _write_configs(work, model, hf_config, dtypes, special, revision)
            if tokenizer_folder is not None:
                copy_tokenizer(tokenizer_folder, work)
            files = sorted(work.iterdir())
            index = {
                "metadata": {"total_size": sum(sizes.values()), "total_parameters": _count(model)},
                "weight_map": dict(sorted(stored.items())),
            }
            text = json.dumps(index, indent=2) + "\n"
            (work / INDEX_FILE).write_text(text, encoding="utf-8")
            for file in [*files, work / INDEX_FILE]:
                os.replace(file, folder / file.name)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be finished ({one_line(error)}); free disk space or choose another "
            "folder"
        ) from None


def _published(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns `tensors` named and split as in a published checkpoint of this model type."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return dict(found)


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    seen: set[int] = set()
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen and tensor.numel() else tensor
        seen.add(storage)
    return result


def _name_parts(folder: Path) -> None:
    """Give the files of all stages their final names, if any stage wrote several files.

    Files of an earlier model in this folder that has the same number of files are replaced.
    """
    files = sorted(folder.glob(_STAGE_FILES))
    parts = [path for path in files if _PART in path.stem]
    if not parts:
        return
    count = parts[0].stem.partition(_PART)[0].rpartition("-")[2]
    current = [path for path in files if path in parts or path.stem.endswith(f"-of-{count}")]
    final = [folder / stage_file_name(n, len(current)) for n in range(len(current))]
    try:
        (folder / INDEX_FILE).unlink(missing_ok=True)
        for path, target in zip(current, final, strict=True):
            os.replace(path, target)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: its files cannot be renamed ({one_line(error)}); write the model again"
        ) from None


def _read_headers(folder: Path) -> tuple[dict[str, str], dict[str, int], set[str]]:
    """Returns the file of each stored name, the bytes of each stored name, and the dtypes.

    The dtypes are the floating-point dtypes that occur.
    """
    from safetensors import SafetensorError, safe_open

    stored: dict[str, str] = {}
    sizes: dict[str, int] = {}
    dtypes: set[str] = set()
    for path in sorted(folder.glob(_STAGE_FILES)):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name in stored:
                        raise CheckpointError(
                            f"{folder}: {name} is in both {stored[name]} and {path.name}; remove "
                            "the files that an earlier model with other stages left there"
                        )
                    part = file.get_slice(name)
                    stored[name] = path.name
                    dtype = part.get_dtype()
                    elements = 1
                    for extent in part.get_shape():
                        elements *= extent
                    sizes[name] = elements * _bytes_of(dtype)
                    if dtype in _DTYPES:
                        dtypes.add(_DTYPES[dtype])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({one_line(error)}); write the checkpoint again"
            ) from None
    if not stored:
        raise CheckpointError(f"{folder}: no stage files ({_STAGE_FILES}) there to finish")
    return stored, sizes, dtypes


def _bytes_of(dtype: str) -> int:
    digits = "".join(character for character in dtype if character.isdigit())
    return max(1, int(digits[:2]) // 8) if digits else 1


def _check_complete(folder: Path, model: nn.Module, stored: Mapping[str, str]) -> None:
    recipes, unknown = find_recipes(model, stored)
    pair = tied_names(model)
    copies = {pair[1]} if pair is not None else set()
    missing = sorted(set(model.state_dict()) - set(recipes) - copies)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{folder}: {missing[0]}{more} is in no stage file; a stage has not written its part: "
            "write the checkpoint again"
        )
    if unknown or copies & set(recipes):
        name = sorted([*unknown, *(copies & set(recipes))])[0]
        raise CheckpointError(
            f"{folder}: {name} in {stored.get(name, 'a stage file')} does not belong to the model; "
            "remove the files that another run left there"
        )


def _write_configs(
    work: Path,
    model: nn.Module,
    hf_config: PretrainedConfig,
    dtypes: set[str],
    special: Mapping[str, Any],
    revision: str | None,
) -> None:
    config: Any = copy.deepcopy(hf_config)
    config.use_cache = True  # it is off while training, but generation is slow without it
    config.architectures = [type(model).__name__]
    config.dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    for key in ("bos_token_id", "eos_token_id"):
        if getattr(config, key, None) is None and key in special:
            setattr(config, key, special[key])
    config.save_pretrained(work)
    _drop_version(work / "config.json")
    write_generation_config(work, hf_config, config, special, revision)


def write_generation_config(
    work: Path,
    hf_config: PretrainedConfig,
    config: Any,
    special: Mapping[str, Any],
    revision: str | None,
) -> None:
    """Write `generation_config.json` into the folder `work`.

    Args:
        work: the folder.
        hf_config: configuration that the run began with; it names where the model came from.
        config: configuration of the published model, whose type has default settings.
        special: values of `special_tokens`. Generation also stops at the ends of turns.
        revision: revision of the model on the hub; None: the newest.

    Raises:
        OSError: if the file cannot be written.
    """
    generation = _generation_config(hf_config, config, revision)
    for key, value in special.items():
        if key != ENDS and getattr(generation, key, None) is None:
            setattr(generation, key, value)
    generation.eos_token_id = _with_ends(generation.eos_token_id, special.get(ENDS, ()))
    # `save_pretrained` refuses combinations of changed settings for which reading gives only a
    # warning. The settings came with the model, and a run must not fail at its end for them.
    generation.to_json_file(
        work / "generation_config.json", use_diff=True, keys_to_pop=["compile_config"]
    )
    _drop_version(work / "generation_config.json")


def _with_ends(known: int | Sequence[int] | None, ends: Sequence[int]) -> Any:
    """Returns the tokens at which generation stops: `known` and `ends`."""
    before = [] if known is None else [known] if isinstance(known, int) else list(known)
    added = [end for end in ends if end not in before]
    return known if not added else [*before, *added]


def _drop_version(file: Path) -> None:
    """Remove the version of transformers, so that all sites publish the same bytes."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content.pop("transformers_version", None)
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


def _generation_config(source: Any, config: Any, revision: str | None) -> Any:
    """Returns the generation settings that came with the model, if they are on this machine.

    Otherwise returns the default settings of the model type.
    """
    from transformers import GenerationConfig

    name = getattr(source, "_name_or_path", "")
    try:
        if name:
            return GenerationConfig.from_pretrained(
                name, revision=revision or "main", local_files_only=True
            )
    except Exception:  # most models come without settings; unreadable files raise many kinds
        return GenerationConfig.from_model_config(config)
    return GenerationConfig.from_model_config(config)


def special_tokens(tokenizer_folder: Path | None, ends_of_turn: Sequence[int]) -> dict[str, Any]:
    """Returns the ids of special tokens by their keys in configurations, and those at `ENDS`.

    Raises `CheckpointError` if the tokenizer cannot be read.
    """
    if tokenizer_folder is None:
        return {}
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{tokenizer_folder}: no usable tokenizer there ({one_line(error)})"
        ) from None
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = {key: getattr(tokenizer, key, None) for key in keys}
    special = {key: value for key, value in found.items() if value is not None}
    return special | {ENDS: tuple(ends_of_turn)}


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer from one folder to another. Raises `OSError`.

    Published models have no subfolders, since sites sign plain files alone. So templates that
    transformers keeps in a subfolder go into the tokenizer's settings, where it looks, too.
    """
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    named = {path.stem: path for path in sorted((source / TEMPLATES_FOLDER).glob("*.jinja"))}
    if not named:
        return
    if (source / TEMPLATE_FILE).is_file():
        named = {"default": source / TEMPLATE_FILE, **named}
    settings = target / "tokenizer_config.json"
    content = json.loads(settings.read_text(encoding="utf-8"))
    content["chat_template"] = [
        {"name": name, "template": path.read_text(encoding="utf-8")} for name, path in named.items()
    ]
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    settings.write_text(text, encoding="utf-8")
    # Beside this file, transformers would pass over the templates in the settings.
    (target / TEMPLATE_FILE).unlink(missing_ok=True)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
