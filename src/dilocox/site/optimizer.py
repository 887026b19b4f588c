"""The inner optimizer over a rank's local fp32 tensors, with clipping and skipping built in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dilocox.config import InnerSection
from dilocox.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")


class InnerOptimizer:
    """Fused AdamW (no weight decay on tensors of one dimension) or plain SGD.

    `parameters` maps full names to plain local tensors (never `DTensor`: a shard is optimized
    where it lies, without the dispatch of distributed tensors). `sgd` has neither momentum nor
    weight decay. Moments exist from the start, so a state always has the same keys and shapes.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], inner: InnerSection) -> None:
        self._parameters = dict(parameters)
        # A shard of a dimension smaller than the number of shards may have no rows.
        trained = [p for p in self._parameters.values() if p.numel() > 0]
        self._optimizer: torch.optim.Optimizer | None = None
        self._moments = inner.optimizer == "adamw"
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
        self.reset()

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: Tensor, skip: Tensor) -> None:
        """One step with gradients / `divisor`, or nothing at all where `skip` is 1.

        Both are fp32 scalars on the parameters' device. The fused kernels read them there, as
        they do for a gradient scaler, so clipping costs no pass over the gradients and deciding
        costs no wait for the device.
        """
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        self._optimizer.found_inf = skip  # type: ignore[attr-defined]
        self._optimizer.step()

    def reset(self) -> None:
        """Forget the moments and the step count."""
        if self._optimizer is None or not self._moments:
            return
        for parameter in self._parameters.values():
            if parameter.numel() > 0:
                self._optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    **{moment: torch.zeros_like(parameter.detach()) for moment in _MOMENTS},
                }

    def state(self) -> dict[str, Tensor]:
        """Live state: `exp_avg/NAME` and `exp_avg_sq/NAME` (fp32, local shape), and `step`.

        Empty for SGD. The moments are the optimizer's own storage, `step` is a copy.
        """
        if not self._moments:
            return {}
        state: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.float32)}
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

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` in, bit for bit. Raises `CheckpointError` for other names or shapes."""
        current = self.state()
        if current.keys() != state.keys():
            odd = sorted(current.keys() ^ state.keys())[0]
            raise CheckpointError(
                f"optimizer state: {odd} is on one side only; it is of another model, cut or "
                "optimizer, load it with the run file that wrote it"
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
