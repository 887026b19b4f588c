"""Bytes that tensor operations allocate, hold and move, counted operation by operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WRITTEN_ONLY = ("aten::copy_", "aten::zero_", "aten::fill_")


class Tracker(TorchDispatchMode):
    """Counts storages that are made while it is on: `held` now, `peak` at most, in bytes.

    `moved`: bytes of all tensors that operations read and write, views aside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = self.moved = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and count."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        made = _tensors(result)
        if not func.is_view:
            self.moved += sum(tensor.nbytes for tensor in given)
            if not func._schema.is_mutable:
                self.moved += sum(tensor.nbytes for tensor in made)
            elif func._schema.name not in WRITTEN_ONLY and "out" not in kwargs:
                self.moved += args[0].nbytes  # read and written
        before = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in made:
            self._note(tensor.untyped_storage(), before)
        return result

    def _note(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in before:
            return
        self._known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)

        def gone() -> None:
            self._known.discard(key)
            self.held -= size

        weakref.finalize(storage, gone)


def _tensors(nested: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]
