"""Small training problems for the simulator."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.simulator import Site


def loss_of(live: dict[str, Tensor], x: Tensor, y: Tensor) -> float:
    """Mean squared error of a linear layer."""
    prediction = x @ live["weight"] + live["bias"]
    return float(((prediction - y) ** 2).mean())


def linear_site(
    weight: list[float], bias: float, x: Tensor, y: Tensor, rate: float, losses: list[float]
) -> Site:
    """One linear layer, plain SGD on fixed data; every step appends its loss before the step."""
    live = {"weight": torch.tensor(weight), "bias": torch.tensor([bias])}

    def inner_step(live: dict[str, Tensor], step: int) -> None:
        losses.append(loss_of(live, x, y))
        error = 2 * (x @ live["weight"] + live["bias"] - y) / len(y)
        live["weight"].sub_(rate * (error @ x))
        live["bias"].sub_(rate * error.sum())

    return Site(live, inner_step)


def layered(seed: int = 0) -> dict[str, Tensor]:
    """Names and odd shapes like a small stage's, an empty shard among them.

    The matrices are just large enough for codecs that thin out or look for directions.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (37, 8)}
    for layer in range(2):
        shapes[f"layers.{layer}.mlp.weight"] = (70, 62 + layer)
        shapes[f"layers.{layer}.norm.weight"] = (0,) if layer == 1 else (7,)
    shapes["norm.weight"] = (5,)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def noisy_site(number: int, rate: float = 0.05) -> Site:
    """A quadratic around a point of the site's own, with noise that depends on (site, step)."""
    targets = layered(100 + number)

    def inner_step(live: dict[str, Tensor], step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + step)
        noise = torch.randn(sum(map(torch.numel, live.values())), generator=generator)
        parts = noise.split([*map(torch.numel, live.values())])
        for (name, tensor), part in zip(live.items(), parts, strict=True):
            tensor.sub_(rate * (tensor - targets[name] + 0.3 * part.view(tensor.shape)))

    return Site(layered(), inner_step)
