"""Place of a rank inside its site: replica, stage, shard, device and process groups."""

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

PATIENCE = timedelta(days=365)
"""Time-out of a further replica that waits for the next order: a site may pause for hours."""


@dataclass(frozen=True)
class SiteMesh:
    """One rank's place among the ranks of its site (see `rank_of_place`).

    `mesh` has the dimensions ("pp", "dp"). In a site of several replicas, "replicate" comes before
    them. A site of one rank has no mesh and no groups, because it communicates with no other rank.

    In a site of several replicas, `own_replica` is the group of the ranks of this rank's replica.
    `same_ranks` is the group of the ranks with this rank's stage and shard in all replicas, in
    replica order. `orders` is a group of the same ranks for tensors on CPUs.
    """

    stages: int
    shards: int
    stage: int
    shard: int
    device: torch.device
    mesh: DeviceMesh | None = None
    replicas: int = 1
    replica: int = 0
    own_replica: Group | None = None
    same_ranks: Group | None = None
    orders: Group | None = None

    @classmethod
    def create(
        cls,
        stages: int,
        shards: int,
        device: torch.device,
        replicas: int = 1,
        timeout: timedelta | None = None,
    ) -> SiteMesh:
        """Return the mesh of the default process group, which must be initialised.

        Collective: every rank of the site calls this.

        Args:
            stages: stages of the site.
            shards: shards of each stage.
            device: this rank's device.
            replicas: replicas of the site.
            timeout: time-out of collectives within a replica, and between equal ranks of replicas.
                None means PyTorch's default.

        Raises `ConfigError` if the group does not have replicas x stages x shards ranks.
        """
        needed = replicas * stages * shards
        if needed == 1:
            return cls(1, 1, 0, 0, device)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != needed:
            product, sizes = "stages x shards", f"{stages} x {shards}"
            if replicas > 1:
                product, sizes = f"replicas x {product}", f"{replicas} x {sizes}"
            raise ConfigError(
                f"site: {world} ranks were started for {product} = {sizes} = "
                f"{needed}; start {needed} ranks or change [site]"
            )
        stage, shard, replica = place_of_rank(dist.get_rank(), shards, stages)
        if replicas == 1:
            mesh = init_device_mesh(device.type, (stages, shards), mesh_dim_names=("pp", "dp"))
            return cls(stages, shards, stage, shard, device, mesh)
        mesh = init_device_mesh(
            device.type, (replicas, stages, shards), mesh_dim_names=("replicate", "pp", "dp")
        )
        members = stages * shards
        own = _own_group(
            [range(n * members, (n + 1) * members) for n in range(replicas)], timeout=timeout
        )
        same = [range(n, needed, members) for n in range(members)]
        # Not the mesh's group: replicas wait in this group while the first one exchanges gradients.
        peers = _own_group(same, timeout=timeout)
        orders = _own_group(same, backend="gloo", timeout=PATIENCE)
        return cls(
            stages, shards, stage, shard, device, mesh, replicas, replica, own, peers, orders
        )

    @property
    def rank(self) -> int:
        """Rank within the site."""
        return self.rank_at(self.stage, self.shard, self.replica)

    def rank_at(self, stage: int, shard: int, replica: int) -> int:
        """Return the rank within the site at this place."""
        return rank_of_place(stage, shard, replica, shards=self.shards, stages=self.stages)

    @property
    def ranks(self) -> int:
        """Number of ranks of one replica of the site."""
        return self.stages * self.shards

    @property
    def sharded(self) -> bool:
        """True if FSDP holds the parameters: with several shards or replicas."""
        return self.replicas * self.shards > 1

    @property
    def pipeline_group(self) -> Group:
        """The ranks of all stages that hold this rank's shard of its replica, in stage order."""
        return self._group("pp")

    @property
    def replica_group(self) -> Group:
        """The ranks of all replicas that hold this rank's stage and shard, in replica order."""
        if self.same_ranks is None:
            raise RuntimeError("a site of one replica has no group of replicas")
        return self.same_ranks

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh of the shards of this rank's stage and replica."""
        return self._whole()["dp"]

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """Mesh for FSDP: the shards, or replicas x shards, of this rank's stage."""
        return self.shard_mesh if self.replicas == 1 else self._whole()["replicate", "dp"]

    def _whole(self) -> DeviceMesh:
        if self.mesh is None:
            raise RuntimeError("a site of one rank has no mesh")
        return self.mesh

    def _group(self, dimension: str) -> Group:
        if self.mesh is None:
            raise RuntimeError("a site of one rank has no process groups")
        return self.mesh.get_group(dimension)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather the 1-D `values` of all ranks of this replica as [ranks, n], in rank order.

        Every rank gets the result. Collective over the replica.
        """
        if self.ranks == 1:
            return values.unsqueeze(0)
        result = values.new_empty(self.ranks, values.numel())
        dist.all_gather_into_tensor(result.view(-1), values, group=self.own_replica)
        return result

    def gather_names(self, names: list[str]) -> list[list[str]]:
        """Gather the lists of names of all ranks of this replica, in rank order.

        Every rank gets the result. The names travel as JSON. Collective over the replica.
        """
        if self.ranks == 1:
            return [names]
        text = torch.tensor(list(json.dumps(names).encode()), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([text.numel()], device=self.device))[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: text.numel()] = text.to(self.device)
        rows = self.gather(padded).cpu()
        return [
            json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)
        ]

    def mean_of_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of the replicas' `value`, on every replica. Collective over replicas."""
        if self.replicas == 1:
            return value
        total = value.clone()
        dist.all_reduce(total, group=self.replica_group)
        return total / self.replicas

    def least_of_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """Return the least of the replicas' `value`, on every replica. Collective over replicas."""
        if self.replicas == 1:
            return value
        least = value.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.replica_group)
        return least


def _own_group(
    groups: list[range], backend: str | None = None, timeout: timedelta | None = None
) -> Group:
    """Make all `groups` and return the group of this rank.

    PyTorch requires that every rank makes all groups, in the same order.
    """
    found: Group | None = None
    for ranks in groups:
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        if dist.get_rank() in ranks:
            found = group
    if found is None:
        raise RuntimeError(f"rank {dist.get_rank()} is in none of its site's groups")
    return found


def rank_of_place(stage: int, shard: int, replica: int, *, shards: int, stages: int) -> int:
    """Return the rank within a site. Ranks count shards first, then stages, then replicas.

    So ranks of the first replica have the same numbers as in a site of one replica.
    """
    return (replica * stages + stage) * shards + shard


def place_of_rank(rank: int, shards: int, stages: int) -> tuple[int, int, int]:
    """Return (stage, shard, replica) of a rank within its site: the inverse of `rank_of_place`."""
    row, shard = divmod(rank, shards)
    replica, stage = divmod(row, stages)
    return stage, shard, replica


def start_site_group(
    stages: int,
    shards: int,
    device: torch.device,
    timeout: timedelta,
    *,
    replicas: int = 1,
    rank: int | None = None,
    init_method: str | None = None,
    store: dist.Store | None = None,
) -> SiteMesh:
    """Join the other ranks of the site (NCCL on GPUs, Gloo on CPUs) and return the mesh.

    Pass `rank` (see `rank_of_place`) and either `init_method` (a URL) or `store`. Without them,
    rank and meeting point come from a launcher's variables RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT. An existing default process group is used as it is. A site of one rank starts no
    process group.

    Raises `ConfigError` without a meeting point, or if the group has another number of ranks.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = replicas * stages * shards
    if world == 1 or dist.is_initialized():
        return SiteMesh.create(stages, shards, device, replicas, timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # With a device, NCCL connects now, so that a bad link shows at the start.
    device_id = device if device.type == "cuda" else None
    if init_method is None and store is None:
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
            raise ConfigError(
                "site: several ranks have no address at which to meet; give an address, or start "
                "the ranks with torchrun"
            )
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        if rank is None:
            raise ConfigError("site: an address was given without this rank's number; give both")
        dist.init_process_group(
            backend,
            init_method=init_method,
            store=store,
            world_size=world,
            rank=rank,
            timeout=timeout,
            device_id=device_id,
        )
    return SiteMesh.create(stages, shards, device, replicas, timeout)
