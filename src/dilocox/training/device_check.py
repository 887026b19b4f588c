"""Checks a device that a user has named, before a model is loaded."""

from __future__ import annotations

from dilocox.errors import ConfigError


def check_device(device: str, asked: str) -> None:
    """Raise `ConfigError` if nothing can be computed on `device`, PyTorch's name of a device.

    `asked`: the key or command that names it, for the message.
    """
    import torch

    try:
        torch.empty(1, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
        raise ConfigError(
            f"{asked}: device {device!r} cannot be used ({reason}); cpu works everywhere"
        ) from None
