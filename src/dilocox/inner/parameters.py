"""Finds the parameters of a rank's chunks by their names in the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from dilocox.inner.pipeline import Computation


def parameters_by_name(
    chunks: Sequence[nn.Module], tied: tuple[str, str] | None, computation: Computation
) -> dict[str, nn.Parameter]:
    """Return the trained form of all parameters of `chunks` by full name, in model order.

    `tied`: full names (owner, copy) of a tensor that the first and the last chunk share.
    """
    parameters: dict[str, nn.Parameter] = {}
    for chunk in chunks:
        names: Any = chunk.full_names()  # type: ignore[operator]
        for name, parameter in chunk.named_parameters():
            parameters[names[name]] = computation.trained(chunk, parameter)
    # In one chunk a tied tensor is one parameter, known by the owner's name.
    if tied is not None and tied[0] not in parameters and len(chunks) == 1:
        holds_both = any(True for name in chunks[0].full_names().values() if name == tied[0])  # type: ignore[operator]
        if holds_both:
            parameters = {tied[0] if n == tied[1] else n: p for n, p in parameters.items()}
    return parameters
