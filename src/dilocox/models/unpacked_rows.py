"""Tells transformers that every row is one sequence, so that it need not read the GPU to find out.

Without an attention mask, transformers looks for packed sequences in the position ids, which it has
made itself. `masking_utils.find_packed_sequence_indices` reads a value back from the device for
every micro-batch, and the host waits for all earlier kernels. Rows of dilocox are never packed, so
the answer is always None. Moreover, fake tensors have no values that could be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

_NAME = "find_packed_sequence_indices"
_UNPACKED: ContextVar[bool] = ContextVar("unpacked", default=False)


@contextmanager
def unpacked_rows() -> Iterator[None]:
    """Within this context and thread, transformers treats every row as one sequence."""
    _install()
    before = _UNPACKED.set(True)
    try:
        yield
    finally:
        _UNPACKED.reset(before)


def _install() -> None:
    """Wrap transformers' function, once per process, so that it obeys `_UNPACKED`.

    Does nothing if this version of transformers does not have the function.
    """
    from transformers import masking_utils

    known: Callable[..., Any] | None = getattr(masking_utils, _NAME, None)
    if known is None or hasattr(known, "__wrapped__"):
        return

    @wraps(known)
    def find(*args: Any, **kwargs: Any) -> Any:
        return None if _UNPACKED.get() else known(*args, **kwargs)

    setattr(masking_utils, _NAME, find)
