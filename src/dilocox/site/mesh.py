"""Where a rank stands inside its site: stage, shard, device and process groups."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dilocox.errors import ConfigError

Group = dist.ProcessGroup


@dataclass(frozen=True)
class SiteMesh:
    """One rank's place among the stages x shards ranks of its site (rank = stage * shards + shard).

    `mesh` has the dimensions ("pp", "dp"). A site of one rank has no mesh and no groups: it
    communicates with nobody.
    """

    stages: int
    shards: int
    stage: int
    shard: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @classmethod
    def create(cls, stages: int, shards: int, device: torch.device) -> SiteMesh:
        """The mesh of an initialised default process group of stages x shards ranks.

        A collective call: every rank of the site makes it. Raises `ConfigError` if the group has
        another size.
        """
        if stages * shards == 1:
            return cls(1, 1, 0, 0, device)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != stages * shards:
            raise ConfigError(
                f"site: {world} ranks were started for stages x shards = {stages} x {shards} = "
                f"{stages * shards}; start {stages * shards} ranks or change site.stages"
            )
        mesh = init_device_mesh(device.type, (stages, shards), mesh_dim_names=("pp", "dp"))
        stage, shard = divmod(dist.get_rank(), shards)
        return cls(stages, shards, stage, shard, device, mesh)

    @property
    def rank(self) -> int:
        """Rank within the site."""
        return self.stage * self.shards + self.shard

    @property
    def ranks(self) -> int:
        """Ranks of the site."""
        return self.stages * self.shards

    @property
    def pipeline_group(self) -> Group:
        """The ranks of all stages that hold this rank's shard, in stage order."""
        return self._group("pp")

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh of this rank's stage, for FSDP."""
        if self.mesh is None:
            raise RuntimeError("a site of one rank has no mesh")
        return self.mesh["dp"]

    def _group(self, dimension: str) -> Group:
        if self.mesh is None:
            raise RuntimeError("a site of one rank has no process groups")
        return self.mesh.get_group(dimension)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The 1-D `values` of all ranks of the site, as [ranks, n] in rank order, on all ranks."""
        if self.mesh is None:
            return values.unsqueeze(0)
        result = values.new_empty(self.ranks, values.numel())
        dist.all_gather_into_tensor(result.view(-1), values)
        return result

    def gather_names(self, names: list[str]) -> list[list[str]]:
        """The lists of names of all ranks, in rank order, on all ranks (as JSON, no pickle)."""
        if self.mesh is None:
            return [names]
        text = torch.tensor(list(json.dumps(names).encode()), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([text.numel()], device=self.device))[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: text.numel()] = text.to(self.device)
        rows = self.gather(padded).cpu()
        return [
            json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)
        ]


def place_of_rank(rank: int, shards: int) -> tuple[int, int]:
    """(stage, shard) of a rank within its site."""
    return divmod(rank, shards)


def start_site_group(
    stages: int,
    shards: int,
    device: torch.device,
    timeout: timedelta,
    *,
    stage: int | None = None,
    shard: int | None = None,
    init_method: str | None = None,
    store: dist.Store | None = None,
) -> SiteMesh:
    """Join the other ranks of the site (NCCL on GPUs, Gloo on CPUs) and build the mesh.

    Give `stage`, `shard` and either `init_method` (a URL) or `store`; without them the rank and
    the meeting point come from an existing launcher's RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT. A default process group that is already there is used as it is. A site of one
    rank starts nothing. Raises `ConfigError` if neither is given, or if the sizes differ.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if stages * shards == 1 or dist.is_initialized():
        return SiteMesh.create(stages, shards, device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # Naming the device lets NCCL connect now, so that a bad link is an error of the start.
    device_id = device if device.type == "cuda" else None
    if init_method is None and store is None:
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
            raise ConfigError(
                "site: several ranks but no place to meet; give an address, or start the ranks "
                "with torchrun"
            )
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        if stage is None or shard is None:
            raise ConfigError("site: an address needs the rank's stage and shard too")
        dist.init_process_group(
            backend,
            init_method=init_method,
            store=store,
            world_size=stages * shards,
            rank=stage * shards + shard,
            timeout=timeout,
            device_id=device_id,
        )
    return SiteMesh.create(stages, shards, device)
