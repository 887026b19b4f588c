"""The inner optimizer over a rank's local fp32 tensors, with clipping and skipping built in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilocox.config.site import InnerSection
from dilocox.errors import CheckpointError
from dilocox.inner.muon import Muon

_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return True if Muon trains the tensor of this full name: a matrix in a numbered layer.

    Embeddings and head are excluded, because their rows stand for single tokens. Tensors of three
    dimensions (all experts in one tensor) are not matrices.
    """
    return len(shape) == 2 and any(part.isdecimal() for part in name.split("."))


class InnerOptimizer:
    """Fused AdamW (no weight decay on tensors of one dimension), plain SGD, or Muon.

    `sgd` has neither momentum nor weight decay. `muon` trains the layers' matrices by Muon, and all
    other tensors by AdamW. Moments exist from the start, so a state always has the same keys and
    shapes.

    Args:
        parameters: plain local tensors by full name. A shard is never a `DTensor`: it is optimized
            in place, without the dispatch of distributed tensors.
        inner: section `[inner]` of the run file.
        shapes: Muon only: shapes of the whole tensors by name. None means the local shapes.
        group: Muon only: ranks that hold the other rows of the tensors.
        precision: Muon only: dtype in which matrices are multiplied.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        inner: InnerSection,
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        group: dist.ProcessGroup | None = None,
        precision: torch.dtype = torch.float32,
    ) -> None:
        whole = shapes or {name: parameter.shape for name, parameter in parameters.items()}
        muon = inner.optimizer == "muon"
        matrices = {
            name: parameter
            for name, parameter in parameters.items()
            if muon and is_hidden_matrix(name, whole[name])
        }
        self._matrices = Muon(
            matrices,
            whole,
            momentum=inner.momentum,
            weight_decay=inner.weight_decay,
            precision=precision,
            group=group,
        )
        own_rate = inner.muon_learning_rate or inner.learning_rate
        self._matrix_rate = own_rate / inner.learning_rate
        self._parameters = {n: p for n, p in parameters.items() if n not in matrices}
        # A shard of a dimension smaller than the number of shards may have no rows.
        trained = [p for p in self._parameters.values() if p.numel() > 0]
        self._optimizer: torch.optim.Optimizer | None = None
        self._moments = inner.optimizer != "sgd"
        if not trained:
            return
        if inner.optimizer == "sgd":
            self._optimizer = torch.optim.SGD(trained, lr=inner.learning_rate, fused=True)
        else:
            groups = [
                {"params": [p for p in trained if p.dim() > 1], "weight_decay": inner.weight_decay},
                {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
            ]
            self._optimizer = torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=inner.learning_rate,
                betas=inner.betas,
                eps=inner.eps,
                fused=True,
            )
            for parameter in trained:
                self._optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    **{moment: torch.zeros_like(parameter.detach()) for moment in _MOMENTS},
                }

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Take one step with gradients / `divisor`; change nothing if `skip` is 1.

        `divisor` and `skip` are fp32 scalars on the parameters' device. The fused kernels read them
        there, as they do for a gradient scaler. So clipping needs no pass over the gradients, and
        skipping needs no wait for the device. With Muon, collective over the group.
        """
        self._matrices.step(learning_rate * self._matrix_rate, divisor, skip)
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        self._optimizer.found_inf = skip  # type: ignore[attr-defined]
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Return the live state: `exp_avg/NAME`, `exp_avg_sq/NAME` (fp32, local shape), and `step`.

        Muon's matrices have `momentum/NAME` instead. The state of SGD is empty. The moments are the
        optimizer's own storage; `step` is a copy.
        """
        if not self._moments:
            return {}
        state: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.float32)}
        state |= {f"momentum/{name}": m for name, m in self._matrices.momenta().items()}
        for name, parameter in self._parameters.items():
            own = (
                self._optimizer.state[parameter]
                if parameter.numel() > 0 and self._optimizer
                else None
            )
            for moment in _MOMENTS:
                state[f"{moment}/{name}"] = (
                    own[moment] if own else torch.zeros_like(parameter.detach())
                )
            if own:
                state["step"] = own["step"].detach().cpu().clone()
        return state

    def moments(self) -> list[Tensor]:
        """Return the storage of all non-empty moments, always in the same order."""
        found = list(self._matrices.momenta().values())
        if self._optimizer is not None and self._moments:
            found += [own[moment] for own in self._optimizer.state.values() for moment in _MOMENTS]
        return [tensor for tensor in found if tensor.numel() > 0]

    def second_moments(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return AdamW's second moments by name, and their bias correction.

        The moments are live, fp32, of local shape. SGD and Muon's matrices have none; tensors
        without elements are left out. The bias correction is 1 - beta2^steps, an fp32 scalar on the
        moments' device; AdamW divides moments by it before use.
        """
        found = {n: p for n, p in self._parameters.items() if p.numel() > 0}
        if self._optimizer is None or not self._moments:
            return {}, torch.ones(())
        state = self._optimizer.state
        step = state[next(iter(found.values()))]["step"]
        weights: Tensor = 1 - self._optimizer.param_groups[0]["betas"][1] ** step
        return {name: state[parameter]["exp_avg_sq"] for name, parameter in found.items()}, weights

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state`, bit for bit. Raises `CheckpointError` if names or shapes differ."""
        current = self.state()
        if current.keys() != state.keys():
            odd = sorted(current.keys() ^ state.keys())[0]
            raise CheckpointError(
                f"optimizer state: {odd} is missing or unexpected; the state is of another model, "
                "cut or optimizer: load it with the run file that wrote it"
            )
        for name, tensor in current.items():
            if tensor.shape != state[name].shape:
                raise CheckpointError(
                    f"optimizer state: {name} has shape {tuple(state[name].shape)}, the model "
                    f"needs {tuple(tensor.shape)}; load it with the run file that wrote it"
                )
        for name, tensor in current.items():
            tensor.copy_(state[name])
        if self._optimizer is not None and self._moments:
            for own in self._optimizer.state.values():
                own["step"].copy_(state["step"])
