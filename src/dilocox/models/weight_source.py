"""Where a model's tensors come from: a pretrained checkpoint, or fresh initialisation."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from dilocox.config.run_config import ModelSection
from dilocox.errors import ModelError
from dilocox.models.architecture import one_line
from dilocox.models.hf_weights import PretrainedWeights, locate_weights
from dilocox.models.meta_model import build_skeleton, tied_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class WeightSource(Protocol):
    """Gives the tensors of a whole model, one at a time."""

    def tensor(self, full_name: str) -> torch.Tensor:
        """The whole tensor (fp32 if it is floating, on the CPU) of that state-dict name."""
        ...


@runtime_checkable
class RowSource(WeightSource, Protocol):
    """A source that can give some rows of a tensor, and reads no more than these."""

    def rows(self, full_name: str, rows: range) -> torch.Tensor:
        """Neighbouring rows of the tensor of that name, otherwise as `tensor` gives it."""
        ...


def read_rows(source: WeightSource, full_name: str, rows: range) -> torch.Tensor:
    """Neighbouring rows of a tensor, of which a source may make the whole."""
    if isinstance(source, RowSource):
        return source.rows(full_name, rows)
    return source.tensor(full_name)[rows.start : rows.stop]


def open_weights(model: ModelSection, hf_config: PretrainedConfig, seed: int) -> WeightSource:
    """The weights that `[model]` asks for.

    With `path` and `pretrained` the safetensors of that folder or hub name, read lazily; else
    fresh initialisation from `seed`. Raises `ModelError`.
    """
    if model.path is not None and model.pretrained:
        folder = locate_weights(model.path, model.revision)
        return PretrainedWeights(folder, hf_config)
    return FreshWeights(hf_config, seed)


FRESH_WEIGHTS = 1
"""Version of how `FreshWeights` makes values of a seed: to be raised with every change of them."""


def fresh_facts() -> dict[str, Any]:
    """All that the bits of `FreshWeights` hang on beside the model and the seed.

    PyTorch draws other bits of a number on other instruction sets, and other numbers in other
    versions; transformers says how each module is initialised.
    """
    return {
        "fresh": FRESH_WEIGHTS,
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


class FreshWeights:
    """The model's own initialisation, one module at a time and independent of any cut.

    Each module that owns tensors is initialised alone, on the CPU, by the model's `_init_weights`
    under a generator seeded by (seed, module name); everything else stays on the meta device.
    The same is then done for its ancestors, since some types set a tensor of a child there.

    A shard's rows are cut from the whole tensor. The model's own code draws the values of a module
    one after the other from one generator. Drawing only some rows would give other values, or
    values that depend on the number of shards.
    """

    def __init__(self, hf_config: PretrainedConfig, seed: int):
        self._model = build_skeleton(hf_config)
        self._seed = seed
        pair = tied_names(self._model)
        self._owner = {pair[1]: pair[0]} if pair is not None else {}
        self._known = set(self._model.state_dict())
        self._ready: dict[str, torch.Tensor] = {}

    def tensor(self, full_name: str) -> torch.Tensor:
        """See `WeightSource`. Raises `ModelError` if the model leaves the tensor unset."""
        name = self._owner.get(full_name, full_name)
        if name not in self._known:
            raise ModelError(f"{full_name}: the model has no such parameter")
        if name not in self._ready:
            self._ready = self._initialise(name.rpartition(".")[0])
        return self._ready.pop(name)

    def _initialise(self, path: str) -> dict[str, torch.Tensor]:
        module = self._model.get_submodule(path)
        saved = [
            (kept, name, tensor)
            for kept in (module._parameters, module._buffers)
            for name, tensor in kept.items()
            if tensor is not None and name not in module._non_persistent_buffers_set
        ]
        made: dict[str, torch.Tensor] = {}
        try:
            for kept, name, tensor in saved:
                real = torch.empty_like(tensor, device="cpu")
                if real.is_floating_point():
                    real.fill_(torch.nan)  # what is still so afterwards was not initialised
                made[name] = real
                kept[name] = nn.Parameter(real) if kept is module._parameters else real  # type: ignore[assignment]
            with torch.no_grad(), _seeded(self._seed, path):
                for ancestor in _up_to_root(path):
                    initialise_module(self._model, ancestor)
        except Exception as error:  # modelling code may raise anything
            raise ModelError(
                f"{path}: cannot be initialised on its own ({one_line(error)}); start from "
                "pretrained weights, or use another model type"
            ) from None
        finally:
            for kept, name, tensor in saved:
                kept[name] = tensor  # type: ignore[assignment]
        for name, real in made.items():
            if real.is_floating_point() and bool(real.isnan().any()):
                raise ModelError(
                    f"{path}.{name}: the model's code does not initialise it; start from "
                    "pretrained weights, or use another model type"
                )
        return {f"{path}.{name}" if path else name: real for name, real in made.items()}


def initialise_module(model: nn.Module, path: str) -> None:
    """Run the model's own initialisation on the one module at `path` of a causal LM."""
    from transformers import PreTrainedModel

    owner: Any = model
    for ancestor in _up_to_root(path):
        candidate = model.get_submodule(ancestor)
        if isinstance(candidate, PreTrainedModel):
            owner = candidate
            break
    owner._init_weights(model.get_submodule(path))


def _up_to_root(path: str) -> Iterator[str]:
    """`path`, its parent, and so on up to the root "" ."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


@contextmanager
def _seeded(seed: int, name: str) -> Iterator[None]:
    """Seed the CPU's default generator from (seed, name), and put its state back afterwards."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    with preserved_generator():
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        yield


@contextmanager
def preserved_generator() -> Iterator[None]:
    """Put the state of the CPU's default generator back afterwards."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
