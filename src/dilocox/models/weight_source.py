"""Sources of a model's tensors: a pretrained checkpoint, or fresh initialisation."""

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
    """Provides the tensors of a whole model, one at a time."""

    def tensor(self, full_name: str) -> torch.Tensor:
        """Returns the unsharded tensor with this name in the state dict, on the CPU.

        A floating-point tensor is fp32. Raises `ModelError` if the source cannot provide it.
        """
        ...


@runtime_checkable
class RowSource(WeightSource, Protocol):
    """A source that can read some rows of a tensor without the others."""

    def rows(self, full_name: str, rows: range) -> torch.Tensor:
        """Returns consecutive rows of the tensor that `tensor(full_name)` returns."""
        ...


def read_rows(source: WeightSource, full_name: str, rows: range) -> torch.Tensor:
    """Returns consecutive rows of a tensor, without reading the others if `source` allows it."""
    if isinstance(source, RowSource):
        return source.rows(full_name, rows)
    return source.tensor(full_name)[rows.start : rows.stop]


def open_weights(model: ModelSection, hf_config: PretrainedConfig, seed: int) -> WeightSource:
    """Returns the source of the weights that `[model]` asks for.

    With `path` and `pretrained`, the source reads the safetensors of the folder or hub model
    lazily. Otherwise it initialises fresh weights from `seed`. Raises `ModelError` if the
    safetensors cannot be fetched or do not fit the configuration.
    """
    if model.path is not None and model.pretrained:
        folder = locate_weights(model.path, model.revision)
        return PretrainedWeights(folder, hf_config)
    return FreshWeights(hf_config, seed)


FRESH_WEIGHTS = 1
"""Version of the way in which `FreshWeights` derives values from a seed. Increase it with every
change of the values."""


def fresh_facts() -> dict[str, Any]:
    """Returns everything that decides the bits of `FreshWeights`, beside the model and the seed.

    PyTorch's random numbers have other bits on other instruction sets, and may be other numbers in
    other versions. transformers defines how each module is initialised.
    """
    return {
        "fresh": FRESH_WEIGHTS,
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


class FreshWeights:
    """Fresh weights by the model's own initialisation, module by module.

    The values do not depend on how the model is cut. Each module that owns tensors is initialised
    alone on the CPU by the model's `_init_weights`, with a generator seeded by (seed, module name).
    All other modules stay on the meta device. `_init_weights` then runs for the ancestors of the
    module, since some model types set a child's tensor there.

    The rows of a shard are cut from the whole tensor. The model's own code draws all values of a
    module from one generator, one after another. Drawing only some rows would give other values, or
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
        """See `WeightSource`. Raises `ModelError` if the model does not initialise the tensor."""
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
                    real.fill_(torch.nan)  # values that are still NaN later were not initialised
                made[name] = real
                kept[name] = nn.Parameter(real) if kept is module._parameters else real  # type: ignore[assignment]
            with torch.no_grad(), seeded(self._seed, path):
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
    """Run the model's own initialisation on only the module at `path` of a causal LM."""
    from transformers import PreTrainedModel

    owner: Any = model
    for ancestor in _up_to_root(path):
        candidate = model.get_submodule(ancestor)
        if isinstance(candidate, PreTrainedModel):
            owner = candidate
            break
    owner._init_weights(model.get_submodule(path))


def _up_to_root(path: str) -> Iterator[str]:
    """Yields `path`, its parent, and so on up to the root, which is ""."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Within this context, seed the CPU's default generator from (seed, name)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    with preserved_generator():
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        yield


@contextmanager
def preserved_generator() -> Iterator[None]:
    """Restore the state of the CPU's default random generator at the end of this context."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
