"""Reads safetensors checkpoints, one tensor at a time, under the model's own names.

A checkpoint may store a tensor under another name than the model, or as several tensors (experts,
fused projections). transformers knows these conversions. This module applies them per tensor, so
that a rank reads no more than it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dilocox.errors import ModelError
from dilocox.models.architecture import one_line
from dilocox.models.meta_model import build_skeleton, tied_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The trained model is published with the generation settings of the model that it started from.
_FETCHED = [
    "*.safetensors",
    INDEX_FILE,
    "config.json",
    "generation_config.json",
    "*.bin.index.json",
]


@dataclass
class Recipe:
    """How one or more of the model's tensors are made from stored tensors."""

    first_name: str
    """Full name of the first tensor that the recipe makes."""
    converter: Any = None
    """Converter of transformers. None: the stored tensor is used unchanged."""
    parts: list[tuple[str, str]] = field(default_factory=list)
    """(pattern of the converter, stored name) of each part, in the order of joining."""


class PretrainedWeights:
    """The safetensors files of a folder as a `RowSource`.

    The constructor raises `ModelError` if a tensor of the model is missing in the files.
    """

    def __init__(self, folder: Path, hf_config: PretrainedConfig):
        self._folder = folder
        self._files = stored_names(folder)
        self._model = build_skeleton(hf_config)
        self._shapes = {name: t.shape for name, t in self._model.state_dict().items()}
        self._recipes, self._unused = find_recipes(self._model, self._files)
        self._open: dict[str, Any] = {}
        pair = tied_names(self._model)
        self._tied = pair
        if pair is not None:
            owner, copy = pair
            # Some checkpoints store the head but not the embedding.
            for name, other in ((owner, copy), (copy, owner)):
                if name not in self._recipes and other in self._recipes:
                    self._recipes[name] = self._recipes[other]
        missing = sorted(set(self._shapes) - set(self._recipes))
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(
                f"{folder}: the safetensors lack {missing[0]}{more}; the weights do not belong to "
                "this config.json, or the download is incomplete: fetch it again"
            )

    @property
    def names(self) -> list[str]:
        """Full names of the tensors in the state dict, without the second of a tied pair."""
        second = self._tied[1] if self._tied else None
        return [name for name in self._shapes if name != second]

    @property
    def parameters(self) -> set[str]:
        """The names in `names` of parameters; the others are names of buffers."""
        return {name for name, _ in self._model.named_parameters()} & set(self.names)

    @property
    def strays(self) -> list[str]:
        """Stored names that are not used, sorted.

        The model does not have such a tensor, or another stored name gives the same tensor.
        """
        twice = [
            stored
            for recipe in self._recipes.values()
            if recipe.converter is None
            for _, stored in recipe.parts[1:]
        ]
        return sorted({*self._unused, *twice})

    def tensor(self, full_name: str) -> torch.Tensor:
        """See `WeightSource`.

        Raises `ModelError` if the name is unknown, the shape is wrong or the file is unreadable.
        """
        recipe = self._recipes.get(full_name)
        if recipe is None:
            raise ModelError(f"{full_name}: the model has no such parameter")
        if self._tied is not None and full_name in self._tied:
            self._check_tied(*self._tied)
        value = self._make(recipe, full_name)
        self._check_shape(full_name, value.shape)
        return value.float() if value.is_floating_point() else value

    def rows(self, full_name: str, rows: range) -> torch.Tensor:
        """See `RowSource`. Raises the same errors as `tensor`.

        If the stored tensor is used unchanged, only the given rows are read. If transformers makes
        the tensor from others (fused projections, experts), the whole tensor is made and then cut,
        because its conversions work on whole tensors.
        """
        recipe = self._recipes.get(full_name)
        if recipe is None or recipe.converter is not None:
            return self.tensor(full_name)[rows.start : rows.stop]
        if self._tied is not None and full_name in self._tied:
            # Each shard compares its own rows; together the shards compare all rows.
            self._check_tied(*self._tied, rows)
        stored = recipe.parts[0][1]
        part = self._handle(stored).get_slice(stored)
        self._check_shape(full_name, part.get_shape())
        value: torch.Tensor = part[rows.start : rows.stop]
        return value.float() if value.is_floating_point() else value

    def _check_shape(self, full_name: str, shape: Sequence[int]) -> None:
        if list(shape) != list(self._shapes[full_name]):
            raise ModelError(
                f"{self._folder}: {full_name} has the shape {list(shape)}, but the configuration "
                f"needs {list(self._shapes[full_name])}; the weights and the configuration "
                "are not of the same model"
            )

    def _make(self, recipe: Recipe, full_name: str) -> torch.Tensor:
        if recipe.converter is None:
            return self._stored(recipe.parts[0][1])
        converter = deepcopy(recipe.converter)
        for pattern, stored in recipe.parts:
            read = partial(self._stored, stored)
            converter.add_tensor(recipe.first_name, stored, pattern, read)
        made = converter.convert(recipe.first_name, model=self._model, config=self._model.config)
        value = made[full_name]
        tensor: torch.Tensor = value[0] if isinstance(value, list) else value
        return tensor

    def _stored(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self._handle(name).get_tensor(name)
        return value

    def _handle(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        file = self._files[name]
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{self._folder / file}: cannot be read ({one_line(error)}); fetch it again"
                ) from None
        return self._open[file]

    def _check_tied(self, owner: str, copy: str, rows: range | None = None) -> None:
        """Raise `ModelError` if the stored tensors of a tied pair differ.

        The configuration then describes another model. `rows` are the rows to compare; None means
        all rows.
        """
        stored = [self._recipes[name] for name in (owner, copy)]
        if stored[0] is stored[1] or any(recipe.converter is not None for recipe in stored):
            return
        names = [recipe.parts[0][1] for recipe in stored]
        a, b = (self._handle(name).get_slice(name) for name in names)
        rows = range(a.get_shape()[0]) if rows is None else rows
        same = a.get_shape() == b.get_shape() and all(
            torch.equal(a[at : (end := min(at + 4096, rows.stop))], b[at:end])
            for at in range(rows.start, rows.stop, 4096)
        )
        if not same:
            raise ModelError(
                f"{self._folder}: config.json ties {copy} to {owner}, but the stored tensors "
                "differ; set tie_word_embeddings to false there"
            )


def locate_weights(path: str, revision: str | None) -> Path:
    """Returns the local folder of the safetensors of `path`; a hub model is downloaded first.

    Raises `ModelError` if the download fails, or if there are no safetensors (pickled weights are
    not read).
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(
                    path,
                    revision=revision,
                    allow_patterns=_FETCHED,
                    ignore_patterns=["consolidated*", "*/*"],
                )
            )
        except Exception as error:  # the hub client raises many kinds of errors
            raise ModelError(
                f"model.path {path}: no such folder, and the download failed "
                f"({one_line(error)}); check the name and the network, or give a local folder"
            ) from None
    if (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file():
        return folder
    raise ModelError(
        f"model.path {path}: no {SINGLE_FILE} or {INDEX_FILE} there; pickled weights (.bin) are "
        "not read: convert them once with from_pretrained and save_pretrained, or set "
        "model.pretrained = false"
    )


def stored_names(folder: Path) -> dict[str, str]:
    """Returns the file name of each stored tensor, by the tensor's name.

    If a folder has both a single file and an index, the single file is used, as in transformers.
    Raises `ModelError` if the index or a file is missing or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if (folder / SINGLE_FILE).is_file():
            with safe_open(folder / SINGLE_FILE, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE_FILE)
        text = (folder / INDEX_FILE).read_text(encoding="utf-8")
        names: dict[str, str] = json.loads(text)["weight_map"]
        for name in sorted(set(names.values())):
            if Path(name).name != name or not (folder / name).is_file():
                raise ModelError(f"{folder}: {name} is missing; fetch the model again")
        return names
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{folder}: its safetensors cannot be read ({one_line(error)}); fetch the model again"
        ) from None


def find_recipes(model: nn.Module, stored: Iterable[str]) -> tuple[dict[str, Recipe], list[str]]:
    """Find out how the tensors of `model` are made from stored tensors.

    Returns (recipes, unused). `recipes` has, by full name, the tensors of the state dict that can
    be made. `unused` lists the `stored` names that the model does not use.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    wanted = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    recipes: dict[str, Recipe] = {}
    unused: list[str] = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, wanted
        )
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target not in wanted:
            unused.append(name)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        recipe = recipes.setdefault(target, Recipe(target, converter))
        recipe.parts.append((pattern or name, name))
        if converter is not None:
            # One conversion may make several tensors; the recipe has the name of the first.
            for other in converter.target_patterns[1:]:
                recipes[target.replace(converter.target_patterns[0], other)] = recipe
    return recipes, unused
