"""Judges the claim `start`: theta_0 is the weights of `run.seed`, or the weights of `model.path`.

With adapters, theta_0 is what `run.seed` gives, the adapters in `adapter.path`, or those that an
earlier run handed over.

Weights of a seed are generated again, one module at a time. On another processor the last bits
differ, and under other versions all bits may differ. So a difference is a FAIL only if processor
and versions cannot explain it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox.config.handover import MOMENTUM
from dilocox.errors import ConfigError, DilocoxError, ModelError, RecordError
from dilocox.record.log.digests import TensorDigest, tensor_digest
from dilocox.record.log.state_statements import State
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer.rank_recorder import MOMENTUM_OF

if TYPE_CHECKING:
    from torch import Tensor

    from dilocox.models import WeightSource
    from dilocox.models.adapter_weights import AdapterWeights

ROUNDING = 1e-3
"""Largest relative difference between weights that two processors generate from one seed: norm of
the difference over norm of the weights. Measured: 1e-7."""
_COMMIT = 40
"""Hex digits of a hub revision that is a commit, so that its files never change."""

Get = Callable[[str], bytes]
Listing = Callable[[State], Sequence[TensorDigest]]


@dataclass(frozen=True)
class Start:
    """Judges the claim `start`."""

    course: RunHistory
    listing: Listing
    """Returns the tensors of a signed state."""
    get: Get
    """Returns an object of the record's stores by SHA-256, hex."""
    folder: Path | None
    """Folder that the reader knows to be `model.path`; None: what this machine has of that name."""
    adapters: Path | None
    """The same of `adapter.path` or `adapter.handover`."""
    progress: Callable[[str, float], None]

    def judge(self) -> str:
        """Compare theta_0; return what was compared. Raises `RecordError` (FAIL), `NotRunError`."""
        states = self._states()
        signed = [(state, each) for state in states for each in self.listing(state)]
        said = self.course.config["model"]
        adapter = self.course.config.get("adapter") or {}
        handed_over = bool(said.get("handover") or adapter.get("handover"))
        if handed_over != any(each.name.startswith(MOMENTUM_OF) for _, each in signed):
            raise RecordError(
                "theta_0 has no outer momentum, and the run file names a handover"
                if handed_over
                else "theta_0 has an outer momentum, and the run file names no handover"
            )
        tensors = {each.name: each for _, each in signed}
        source = self._source(said, tensors)
        for number, (state, each) in enumerate(signed):
            self.progress("making theta_0 again", number / len(signed))
            found = _read(source, each.name)
            if tensor_digest(each.name, found) != each:
                self._unlike(source, state, each, found)
        return f"{len(signed)} tensors, the same bits as {source.what}"

    def _states(self) -> list[State]:
        found = [self.course.state("initial", stage)[-1:] for stage in range(self.course.stages)]
        if not all(found):
            raise NotRunError("no theta_0 of every stage is signed: the run has not begun")
        return [state for states in found for state in states]

    def _source(self, said: Mapping[str, Any], tensors: Mapping[str, TensorDigest]) -> _Source:
        """Return the source of theta_0 by the run file; check the names and shapes of `tensors`."""
        from dilocox.models.hf_weights import PretrainedWeights
        from dilocox.models.weight_source import FreshWeights

        if said.get("own"):
            raise NotRunError(
                "the run file names no first weights (model.own): they are those of the site that "
                "began the run"
            )
        path, pretrained = said.get("path"), bool(said.get("pretrained", True))
        folder, sure = (None, True) if path is None else folder_of_model(said, self.folder)
        adapter = self.course.config.get("adapter")
        seed = int(self.course.config["run"]["seed"])
        try:
            config = _config_of(said, folder, tensors)
            if adapter is not None:
                return self._adapters(config, adapter, seed, tensors)
            _check_names(config, tensors)
            if folder is None or not pretrained:
                return _Source(FreshWeights(config, seed), f"run.seed = {seed} gives", None, True)
            weights = PretrainedWeights(folder, config)
        except (ModelError, ConfigError) as error:
            raise NotRunError(f"theta_0 cannot be made again here: {error}") from None
        dtype = self.course.momentum_dtype
        return _Source(weights, f"{folder} holds", folder, sure, dtype)

    def _adapters(
        self,
        config: Any,
        said: Mapping[str, Any],
        seed: int,
        tensors: Mapping[str, TensorDigest],
    ) -> _Source:
        """Return the source of the first adapters. `said`: section `[adapter]` of the run file."""
        key = "path" if said.get("handover") is None else "handover"
        named = said.get(key)
        if named is None:
            found = _adapters(config, said, seed, tensors, None)
            return _Source(found, f"run.seed = {seed} gives", None, True)
        folder = self.adapters or Path(str(named)).expanduser()
        if not folder.is_dir():
            raise NotRunError(
                f"{folder}: not there; the run's adapters began from adapter.{key} = {named}: "
                "name its folder with --adapters"
            )
        _check_plain(folder)
        found = _adapters(config, said, seed, tensors, folder)
        sure, dtype = self.adapters is not None, self.course.momentum_dtype
        if key == "path":
            _check_adapters(folder, said, sure)
        return _Source(found, f"{folder} holds", folder, sure, dtype, "--adapters")

    def _unlike(self, source: _Source, state: State, signed: TensorDigest, found: Tensor) -> None:
        """Raise the verdict for a tensor that differs: `RecordError` (FAIL) or `NotRunError`."""
        where = f"{signed.name} of theta_0, which {state.site} signed, is not what {source.what}"
        if source.folder is not None:
            raise _unlike_folder(where, source.sure, source.option)
        self._unlike_fresh(where, state, signed, found)

    def _unlike_fresh(self, where: str, state: State, signed: TensorDigest, found: Tensor) -> None:
        from dilocox.models.weight_source import fresh_facts

        theirs, ours = state.facts, fresh_facts()
        if not theirs:
            if self.course.manifest.get("start_class"):
                raise RecordError(f"{where}, and {state.site} has not said what made it")
            raise NotRunError(f"{where}; this record does not say what made it, and bits differ "
                              "between processors and versions")  # fmt: skip
        if theirs == ours:
            raise RecordError(where)
        run = str(self.course.manifest["versions"]["torch"])
        if _base(theirs.get("torch")) != _base(run):
            raise RecordError(f"{where}, and {state.site} names torch {theirs.get('torch')}, with "
                              f"which it could not take part: the run has {run}")  # fmt: skip
        libraries = [name for name in ("torch", "transformers", "fresh")
                     if _base(theirs.get(name)) != _base(ours[name])]  # fmt: skip
        if libraries:
            named = ", ".join(f"{_LIBRARIES[name]} {theirs.get(name)}" for name in libraries)
            raise NotRunError(f"{where}; it was made by {named}: verify with the same")
        apart = self._apart(signed, found)
        if apart is not None and not apart <= ROUNDING:
            raise RecordError(f"{where}: it is {apart:.1g} of its size off, and processors differ "
                              f"by {ROUNDING:g} at most")  # fmt: skip
        size = "" if apart is None else f", by {apart:.1g} of its size"
        made = f"{theirs.get('machine')} with {theirs.get('instructions')}"
        raise NotRunError(f"{where}{size}; it was made on {made}: verify on such a machine")

    def _apart(self, signed: TensorDigest, found: Tensor) -> float | None:
        """Return the norm of the difference over the norm of `found`; None without the bytes."""
        import torch

        try:
            data = self.get(signed.sha256)
        except DilocoxError:
            return None
        theirs = torch.frombuffer(bytearray(data), dtype=torch.float32)
        ours = found.detach().float().reshape(-1)
        if signed.dtype != "float32" or theirs.shape != ours.shape:
            return math.inf
        norm = float(torch.linalg.vector_norm(ours, dtype=torch.float64))
        off = float(torch.linalg.vector_norm(theirs - ours, dtype=torch.float64))
        return off / norm if norm else (math.inf if off else 0.0)


_LIBRARIES = {"torch": "torch", "transformers": "transformers", "fresh": "initialisation"}


@dataclass
class _Source:
    """The source of theta_0."""

    weights: WeightSource
    what: str
    """Phrase for messages, for example `run.seed = 3 gives`."""
    folder: Path | None
    """Folder of stored weights; None for weights of a seed."""
    sure: bool
    """True if this certainly is the source that the run file names."""
    momentum_dtype: str = "fp32"
    option: str = "--start"
    """Option of `dilocox verify` that names `folder`."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of theta_0, or of the outer momentum in a handover."""
        if not name.startswith(MOMENTUM_OF):
            return self.weights.tensor(name)
        assert self.folder is not None
        return _momentum(self.folder, name.removeprefix(MOMENTUM_OF), self.momentum_dtype)


def folder_of_model(said: Mapping[str, Any], folder: Path | None) -> tuple[Path, bool]:
    """Return the folder of `model.path`, and True if the run certainly began from it.

    `said`: section `[model]` of the run file. `folder`: folder that the reader knows to be
    `model.path`; None: what this machine has of that name. Raises `NotRunError` without a folder.
    """
    if folder is not None:
        if not folder.is_dir():
            raise NotRunError(f"{folder}: no such folder; name another one with --start")
        return folder, True
    path, revision = str(said["path"]), said.get("revision")
    local = Path(path).expanduser()
    if local.is_dir():
        _check_plain(local)
        return local, False
    named = path if revision is None else f"{path} at {revision}"
    cached = _cached(path, revision)
    if cached is None:
        raise NotRunError(
            f"the run began from {named}, which is not on this machine: name its folder with "
            "--start"
        )
    return cached, len(str(revision)) == _COMMIT


def _adapters(
    config: Any,
    said: Mapping[str, Any],
    seed: int,
    tensors: Mapping[str, TensorDigest],
    stored: Path | None,
) -> AdapterWeights:
    """Return the source of the first adapters, after checking the names and shapes of `tensors`.

    `said`: section `[adapter]` of the run file. With a handover `tensors` has the outer momentum,
    too. `stored`: folder of the first adapters; None: the seed gives them. Raises `RecordError` for
    other tensors, and the errors of `AdapterWeights`.
    """
    from pydantic import ValidationError

    from dilocox.config.adapter import AdapterSection
    from dilocox.models.adapter_weights import AdapterWeights

    try:
        section = AdapterSection.model_validate(dict(said))
    except ValidationError as error:
        raise RecordError(f"the run file's [adapter] is not valid: {error}") from None
    if section.path is not None and section.freeze_a:
        raise RecordError("the run file names adapters in adapter.path and freezes others (A)")
    found = AdapterWeights(config, section, seed, None, stored)
    shapes = dict(found.shapes)
    if section.handover is not None:
        shapes |= {MOMENTUM_OF + name: shape for name, shape in found.shapes.items()}
    for name in sorted(shapes.keys() | tensors.keys()):
        has = tuple(shapes[name]) if name in shapes else None
        signed = tensors[name].shape if name in tensors else None
        if has != signed:
            raise RecordError(f"{name} of theta_0 has shape {signed}; the model's is {has}")
    return found


def _check_adapters(folder: Path, said: Mapping[str, Any], sure: bool) -> None:
    """Check that the adapters in `folder` are computed as the run file's `[adapter]`, `said`, says.

    Their values alone do not show it. Raises `RecordError` if `folder` certainly is the one that
    the run file names, and otherwise `NotRunError`.
    """
    from dilocox.config.adapter import AdapterSection
    from dilocox.models.start_adapters import check_settings

    try:
        check_settings(str(folder), AdapterSection.model_validate(dict(said)))
    except (ModelError, ConfigError) as error:
        raise _unlike_folder(str(error), sure, "--adapters") from None


def _read(source: _Source, name: str) -> Tensor:
    """Return a tensor of theta_0. Raises the verdict if the folder of stored weights lacks it."""
    try:
        return source.tensor(name)
    except ModelError as error:
        if source.folder is None:
            raise
        raise _unlike_folder(str(error), source.sure, source.option) from None


def _unlike_folder(what: str, sure: bool, option: str) -> Exception:
    """Return the verdict for a folder that does not hold theta_0."""
    if sure:
        return RecordError(what)
    return NotRunError(
        f"{what}: if the run began from other files of that name, name their folder with {option}"
    )


def _momentum(folder: Path, name: str, dtype: str) -> Tensor:
    """Load a whole tensor of a handover's outer momentum, rounded to `dtype`, as fp32."""
    from safetensors import SafetensorError, safe_open

    from dilocox.outer.outer_step import MOMENTUM_DTYPES

    try:
        with safe_open(folder / MOMENTUM, framework="pt") as file:
            found: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise NotRunError(f"{folder / MOMENTUM}: cannot be read ({error})") from None
    return found.to(MOMENTUM_DTYPES[dtype]).float()


def _config_of(
    said: Mapping[str, Any], folder: Path | None, tensors: Mapping[str, TensorDigest]
) -> Any:
    """Load the model's configuration. Raises `ModelError`."""
    from dilocox.config.run_config import ModelSection
    from dilocox.models import load_model_config

    if folder is not None:
        pretrained = bool(said.get("pretrained", True))
        model = ModelSection(path=str(folder), pretrained=pretrained)
        return load_model_config(model, None)
    model = ModelSection(architecture=dict(said["architecture"]))
    _check_layers(said["architecture"], tensors)
    config = load_model_config(model, None)
    if "vocab_size" in said["architecture"]:
        return config
    # The vocabulary size is the tokenizer's, which is the number of rows of the embedding.
    from dilocox.models.meta_model import build_skeleton, find_layout

    layout = find_layout(build_skeleton(config))
    embedding = tensors.get(f"{layout.body}.{layout.embedding}.weight")
    if embedding is None or not embedding.shape:
        raise RecordError("theta_0 has no embedding")
    return load_model_config(model, embedding.shape[0])


def _check_layers(architecture: Mapping[str, Any], tensors: Mapping[str, TensorDigest]) -> None:
    """Raise `RecordError` for more layers than tensors.

    A stranger's run file may ask for more layers than this machine can build.
    """
    layers = architecture.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):
        raise RecordError(f"theta_0 has {len(tensors)} tensors, and the model {layers} layers")


def _check_names(config: Any, tensors: Mapping[str, TensorDigest]) -> None:
    """Raise `RecordError` unless `tensors` are the model's parameters, each in its shape."""
    from dilocox.models.meta_model import build_skeleton, tied_names

    model = build_skeleton(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    pair = tied_names(model) or ("", "")
    for name, each in tensors.items():
        shape = shapes.get(name.removeprefix(MOMENTUM_OF))
        if shape != each.shape:
            has = "the model has no such tensor" if shape is None else f"the model has {shape}"
            raise RecordError(f"{name} of theta_0 is {each.dtype} {each.shape}; {has}")
    for name, _ in model.named_parameters():
        if name not in tensors and not (name in pair and any(each in tensors for each in pair)):
            raise RecordError(f"theta_0 has no {name}")


def _check_plain(folder: Path) -> None:
    """Raise `NotRunError` if `folder` holds anything other than files and folders.

    A stranger's run file may name any folder of this machine, and reading a pipe never ends.
    """
    odd = [each.name for each in folder.iterdir() if not each.is_file() and not each.is_dir()]
    if odd:
        raise NotRunError(f"{folder / odd[0]}: not a file; name another folder with --start")


def _cached(path: str, revision: str | None) -> Path | None:
    """Return the local cache folder of a hub's model, or None; downloads nothing."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except Exception:  # the hub client raises many types of exceptions if the model is missing
        return None


def _base(version: Any) -> str:
    """Return a version without its build suffix, such as `+cpu`."""
    return str(version).split("+")[0]
