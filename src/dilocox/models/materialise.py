"""Fills a chunk on the meta device with its own part of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from dilocox.models.chunk import ModelChunk
from dilocox.models.nf4 import Nf4Linear
from dilocox.models.weight_source import WeightSource, initialise_module, read_rows

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def materialise(chunk: ModelChunk, source: WeightSource, device: torch.device | str) -> None:
    """Allocate the memory of a meta chunk on `device` and fill in its values, in place.

    `fully_shard` may have been applied to the chunk and its layers. Each rank then fills its own
    shard, and reads only its own rows if `source` is a `RowSource`. Beside the chunk, at most one
    unsharded tensor of the model is in memory. Ranks do not communicate.

    Raises the `ModelError` of `source` if a tensor cannot be read.
    """
    shared = _shared_parameters(chunk)
    chunk.to_empty(device=device)
    # `to_empty` allocates memory for every use of a shared parameter; make it one parameter again.
    for first, others in shared:
        for path, name in others:
            owner_path, owner_name = first
            owner = chunk.get_submodule(owner_path)._parameters[owner_name]
            chunk.get_submodule(path)._parameters[name] = owner
    state = chunk.state_dict(keep_vars=True)
    packed = {
        f"{path}.packed": module
        for path, module in chunk.named_modules()
        if isinstance(module, Nf4Linear)
    }
    with torch.no_grad():
        for local, full in chunk.full_names().items():
            if local in packed:
                packed[local].fill(source.tensor(full))
                continue
            rows = own_rows(state[local])
            if rows is None:
                value = local_part(state[local], source.tensor(full))
            elif rows:
                value = read_rows(source, full, rows)
            else:
                continue
            _local(state[local]).copy_(value)
            del value
    _fill_computed_buffers(chunk)


def own_rows(target: torch.Tensor) -> range | None:
    """Returns the rows of the whole tensor that this rank holds, if `target` is sharded by rows.

    Returns None if `target` is not sharded or is sharded in another way.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(target, DTensor) or target.dim() == 0:
        return None
    if not any(isinstance(placement, Shard) for placement in target.placements):
        return None
    coordinate, rows = target.device_mesh.get_coordinate(), range(target.shape[0])
    if coordinate is None:
        return rows[:0]
    for dim, placement in enumerate(target.placements):
        # Subclasses of `Shard` may lay rows out in another order, so the exact type is compared.
        if type(placement) is Shard and placement.dim == 0:
            # Rows are cut as by `torch.chunk`, so the last ranks may have fewer rows, or none.
            run = -(-len(rows) // target.device_mesh.size(dim))
            rows = rows[coordinate[dim] * run : (coordinate[dim] + 1) * run]
        elif not isinstance(placement, Replicate):
            return None
    return rows


def local_part(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of the unsharded `value` for `target`.

    The part is the whole value if `target` is not sharded. Each sharded dimension is cut as by
    `torch.chunk`, which is DTensor's rule. Raises `ValueError` if the shapes differ.
    """
    from torch.distributed.tensor import DTensor, Shard

    if value.shape != target.shape:
        raise ValueError(f"shape {tuple(value.shape)} given for {tuple(target.shape)}")
    if not isinstance(target, DTensor):
        return value
    coordinate = target.device_mesh.get_coordinate()
    if coordinate is None:
        return value.flatten()[:0]
    for dim, placement in enumerate(target.placements):
        if isinstance(placement, Shard):
            parts = torch.chunk(value, target.device_mesh.size(dim), dim=placement.dim)
            empty = value.narrow(placement.dim, 0, 0)
            value = parts[coordinate[dim]] if coordinate[dim] < len(parts) else empty
    return value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    sharded: DTensor = tensor
    return sharded.to_local()


def _shared_parameters(
    chunk: nn.Module,
) -> list[tuple[tuple[str, str], list[tuple[str, str]]]]:
    """Returns the parameters that several modules share, as (first place, other places).

    A place is (path of the module, name of the parameter).
    """
    places: dict[int, list[tuple[str, str]]] = {}
    for path, module in chunk.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((path, name))
    return [(found[0], found[1:]) for found in places.values() if len(found) > 1]


def _fill_computed_buffers(chunk: ModelChunk) -> None:
    """Compute the buffers that checkpoints do not contain (rotary frequencies, embedding scales).

    The model's own initialisation computes them. Meanwhile, "meta" parameters replace the module's
    parameters, so that the real ones keep their values and no random values are drawn.
    """
    for path, module in list(chunk.lm.named_modules()):
        names = [
            n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None
        ]
        if not names:
            continue
        buffers = {name: module._buffers[name] for name in names}
        parameters = dict(module._parameters)
        try:
            for name, buffer in buffers.items():
                assert buffer is not None
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
            for name, parameter in parameters.items():
                if parameter is not None:
                    meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    module._parameters[name] = nn.Parameter(meta)
            with torch.no_grad():
                initialise_module(chunk.lm, path)
                for name, buffer in buffers.items():
                    made = module._buffers[name]
                    assert buffer is not None
                    assert made is not None
                    buffer.copy_(made)
        finally:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
