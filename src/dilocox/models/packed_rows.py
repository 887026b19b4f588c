"""Tells transformers whether rows are packed, so that it need not read the GPU to find out.

Without an attention mask, transformers looks for packed documents in the position ids.
`masking_utils.find_packed_sequence_indices` reads a value back from the device for every
micro-batch, and the host waits for all earlier kernels. Here it is known beforehand which rows are
packed: those that come with position ids. Moreover, fake tensors have no values that could be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_NAME = "find_packed_sequence_indices"
_PACKED: ContextVar[bool | None] = ContextVar("packed", default=None)
"""True: rows are packed; False: every row is one sequence; None: transformers finds out."""


def document_numbers(positions: Tensor) -> Tensor:
    """Return the number, from 0, of each token's document in its row: int64 [b, L].

    `positions`: int64 [b, L]; a position that does not follow the one before begins a document.
    """
    return F.pad(positions.diff(dim=-1) != 1, (1, 0)).cumsum(-1)


def packed_arguments(positions: Tensor, attention: str) -> dict[str, Any]:
    """Return the arguments of a model's body for packed rows with `positions`, int64 [b, L].

    Flash attention takes the bounds of all documents of all rows, one after the other. The number
    of documents is read back from a GPU, once per micro-batch and chunk; transformers itself would
    do so in every layer, and for a single row only. Other kinds of attention wait for nothing.
    """
    given: dict[str, Any] = {"position_ids": positions}
    if attention.startswith("flash_attention"):
        starts = F.pad(positions.diff(dim=-1) != 1, (1, 0), value=True).flatten().nonzero().view(-1)
        bounds = F.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)
        longest = positions.shape[-1]
        given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        given |= {"max_length_q": longest, "max_length_k": longest}
    return given


@contextmanager
def unpacked_rows() -> Iterator[None]:
    """Within this context and thread, transformers treats every row as one sequence."""
    with _known(False):
        yield


@contextmanager
def packed_rows() -> Iterator[None]:
    """Within this context and thread, transformers takes the documents from the position ids."""
    with _known(True):
        yield


@contextmanager
def _known(packed: bool) -> Iterator[None]:
    _install()
    before = _PACKED.set(packed)
    try:
        yield
    finally:
        _PACKED.reset(before)


def _install() -> None:
    """Wrap transformers' function, once per process, so that it obeys `_PACKED`.

    Does nothing if this version of transformers does not have the function.
    """
    from transformers import masking_utils

    known: Callable[..., Any] | None = getattr(masking_utils, _NAME, None)
    if known is None or hasattr(known, "__wrapped__"):
        return

    @wraps(known)
    def find(position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = _PACKED.get()
        if packed is None:
            return known(position_ids, *args, **kwargs)
        return document_numbers(position_ids) if packed else None

    setattr(masking_utils, _NAME, find)
