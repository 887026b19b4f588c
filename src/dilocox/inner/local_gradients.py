"""The gradients that a rank's optimizer and its exchanges get after the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from dilocox.errors import TrainingError
from dilocox.inner.fsdp import drop_gathered, local
from dilocox.inner.mesh import SiteMesh


class LocalGradients:
    """Finds this rank's gradients, and refuses a trained parameter that got none.

    Args:
        chunks: this rank's chunks.
        trained: the trained parameters by full name; under FSDP they are sharded.
        locals_: what the optimizer trains, by the same names: this rank's shards, or `trained`.
        mesh: this rank's place in the site.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        trained: Mapping[str, nn.Parameter],
        locals_: Mapping[str, nn.Parameter],
        mesh: SiteMesh,
    ) -> None:
        self._chunks, self._trained, self._locals, self._mesh = chunks, trained, locals_, mesh
        self._checked = False

    def collect(self) -> dict[str, Tensor]:
        """Return local fp32 gradients by full name; also set them as `.grad` for the optimizer.

        Raises `TrainingError`, which names the tensor, if a trained parameter got no gradient.
        """
        for chunk in self._chunks:
            drop_gathered(chunk)
        missing = [name for name, p in self._trained.items() if p.grad is None]
        self._refuse(missing)
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._trained.items():
            assert parameter.grad is not None
            gradients[name] = local(parameter.grad)
            if self._mesh.sharded:
                self._locals[name].grad = gradients[name]
        return gradients

    def drop(self) -> None:
        """Free the gradients."""
        for name, parameter in self._trained.items():
            parameter.grad = None
            self._locals[name].grad = None

    def _refuse(self, missing: list[str]) -> None:
        where = self._mesh.stage
        # After the first step all ranks compare, because a wrong model or schedule shows then. In
        # later steps each rank checks its own parameters only.
        if not self._checked:
            everywhere = self._mesh.gather_names(missing)
            for rank, names in enumerate(everywhere):
                if names:
                    where, missing = rank // self._mesh.shards, names
                    break
        if missing:
            raise TrainingError(
                f"stage {where}: {missing[0]} got no gradient ({len(missing)} such tensors); the "
                "model's forward pass does not use it: freeze it (requires_grad = False)"
            )
        self._checked = True
