"""Checks a device that a user has named, before a model is loaded."""

from __future__ import annotations

from dilocox.errors import ConfigError
from dilocox.utils.formatting import reason_of


def check_device(device: str, asked: str) -> None:
    """Raise `ConfigError` if nothing can be computed on `device`, PyTorch's name of a device.

    `asked`: the key or command that names it, for the message.
    """
    import torch

    try:
        torch.empty(1, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{asked}: device {device!r} cannot be used ({reason_of(error)}); cpu works everywhere"
        ) from None
