"""Further replicas of a site, which follow orders of the first replica (hybrid sharding).

Only the first replica takes part in the run: its ranks exchange, keep checkpoints and write the
record. A rank of another replica holds a part of the same model. It waits for an order from the
rank of the first replica with the same stage and shard. Then it copies the weights and the
optimizer state that have changed at that rank since the last order. Last, it makes the same call on
its own rows of the batch.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dilocox.errors import TrainingError
from dilocox.inner.counted import CountedLabels
from dilocox.inner.mesh import SiteMesh

log = logging.getLogger(__name__)

Call = Literal["inner_step", "loss_and_gradients", "evaluate", "end"]
TiedState = Literal["weights", "moments"]
Rows = tuple[Tensor, Tensor, CountedLabels | None]
"""Inputs, labels, and what is known of labels that do not count."""


@dataclass(frozen=True)
class Order:
    """Order of a rank of the first replica to the other replicas' ranks of its stage and shard."""

    call: Call
    """Method of the model to call; "end" ends `follow`."""
    rows: int = 0
    """Rows of the batch, for all replicas together."""
    length: int = 0
    """Tokens of a row."""
    learning_rate: float = 0.0
    averaged: bool = False
    """True if sites average gradients in this step."""
    names: tuple[str, ...] = ()
    """Argument of `loss_and_gradients`."""
    weights: tuple[int, ...] = ()
    """Places, in the model's order, of the local tensors that have changed."""
    optimizer: bool = False
    """True if the optimizer's state has changed."""
    tied: TiedState | None = None
    """Not None if the copy of a tied tensor was set from its owner. `moments`: weights and second
    moments were set; `weights`: only the weights."""
    labels: int | None = None
    """Counted labels of the batch; None: all labels count (see `CountedLabels`)."""
    divisor: float = 0.0
    """Divisor of the sum of the losses, if `labels` is given."""
    positions: bool = False
    """True if positions of tokens in their documents come with the batch."""
    columns: int = 0
    """Columns beside the labels (see `dilocox.inner.columns`)."""
    seed: int = 0
    """Seed of random numbers, such as those of dropout."""


class ReplicatedModel(Protocol):
    """Part of `dilocox.inner.site_model.SiteModel` that replicas use; its docstrings say more."""

    def evaluate(
        self, input_ids: Tensor, labels: Tensor, counted: CountedLabels | None = None
    ) -> float:
        """Return the mean loss over the rows of all shards."""

    def loss_and_gradients(
        self,
        input_ids: Tensor,
        labels: Tensor,
        names: Sequence[str],
        counted: CountedLabels | None = None,
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss over the rows of all shards, and its gradients."""

    def inner_step(
        self,
        input_ids: Tensor,
        labels: Tensor,
        learning_rate: float,
        exchange_gradients: Callable[[dict[str, Tensor]], None] | None = None,
        counted: CountedLabels | None = None,
    ) -> object:
        """Take one optimizer step on this shard's rows of the site's batch."""

    def compile_problem(self) -> str | None:
        """Return, once after the first step, why layers run without being compiled, or None."""

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's fp32 storage by full name, in model order."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the live state of the inner optimizer."""

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the inner optimizer's state, bit for bit."""

    def moments(self) -> list[Tensor]:
        """Return the storage of the inner optimizer's moments."""

    def sync_tied(self, moments: bool = False) -> None:
        """Set the copy of a tied tensor from its owner; with `moments` its second moments, too."""


class Leader:
    """A rank of the first replica, which sends orders to the other replicas.

    PyTorch's version counters tell which weights and moments have changed: they count every write
    in place. So code that writes to the model need not know of replicas.
    """

    def __init__(self, model: ReplicatedModel, mesh: SiteMesh) -> None:
        self._model, self._mesh = model, mesh
        self._weights = list(model.local_tensors().values())
        # The state of the other replicas is unknown, so the first order sends everything.
        self._seen: list[int] = [-1] * len(self._weights)
        self._moments_seen: list[int] = []
        self._tied: TiedState | None = None

    def optimizer_replaced(self) -> None:
        """Call this after the optimizer's state was loaded: the next order sends it."""
        self._moments_seen = []

    def tied_synced(self, moments: bool) -> None:
        """Call this after the copy of the tied tensor was set from its owner.

        `moments`: the second moments were set, too.
        """
        self._tied = "moments" if moments or self._tied == "moments" else "weights"

    def order(
        self,
        call: Call,
        input_ids: Tensor,
        labels: Tensor,
        counted: CountedLabels | None = None,
        *,
        learning_rate: float = 0.0,
        averaged: bool = False,
        names: Sequence[str] = (),
    ) -> Rows:
        """Order `call` on a batch, and return this rank's own rows of it, on the device.

        `input_ids`, `labels`: int64 [b, L]; `counted`: see `CountedLabels`. Every replica gets
        b / replicas rows. The other arguments go to the call (see `Order`). Collective over the
        replicas. Raises `ValueError` if b is not a multiple of the number of replicas.
        """
        rows, length = input_ids.shape
        if rows % self._mesh.replicas:
            raise ValueError(f"{rows} rows do not divide by {self._mesh.replicas} replicas")
        weights = [t._version for t in self._weights]
        moments = self._moment_versions()
        order = Order(
            call,
            rows,
            length,
            learning_rate,
            averaged,
            tuple(names),
            tuple(n for n, seen in enumerate(self._seen) if seen != weights[n]),
            optimizer=moments != self._moments_seen,
            tied=self._tied,
            labels=None if counted is None else counted.labels,
            divisor=0.0 if counted is None else counted.divisor,
            positions=counted is not None and counted.positions is not None,
            columns=labels.shape[1] - 1 if labels.dim() == 3 else 0,
            seed=_seed(self._mesh.device),
        )
        _send(self._mesh, order)
        _share_state(self._model, self._mesh, order)
        parts = [input_ids, *(labels.unbind(1) if labels.dim() == 3 else [labels])]
        if counted is not None and counted.positions is not None:
            parts.append(counted.positions)
        batch = torch.stack([each.to(self._mesh.device, non_blocking=True) for each in parts])
        dist.broadcast(batch, group=self._mesh.replica_group, group_src=0)
        self._tied = None
        self.done()
        return _own_rows(batch, order, self._mesh)

    def done(self) -> None:
        """Note that the other replicas have the same state as this rank now."""
        self._seen = [t._version for t in self._weights]
        self._moments_seen = self._moment_versions()

    def end(self) -> None:
        """Order the other replicas to end."""
        _send(self._mesh, Order("end"))

    def _moment_versions(self) -> list[int]:
        # The list is never empty, because an empty list stands for "unknown".
        return [0, *(t._version for t in self._model.moments())]


def _seed(device: torch.device) -> int:
    """Return a seed below 2^63, derived from the state of this rank's random number generators."""
    state = torch.get_rng_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(device)])
    digest = hashlib.sha256(state.numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def follow(model: ReplicatedModel, mesh: SiteMesh, step_done: Callable[[], None]) -> None:
    """Follow the orders of the first replica until an order to end.

    `step_done` is called after every inner step. Raises `TrainingError` if the first replica is
    lost. Errors of the ordered calls pass through.
    """
    checked = False
    while True:
        order = _receive(mesh)
        if order.call == "end":
            return
        _share_state(model, mesh, order)
        parts = 2 + order.columns + order.positions
        batch = torch.empty(parts, order.rows, order.length, dtype=torch.int64, device=mesh.device)
        dist.broadcast(batch, group=mesh.replica_group, group_src=0)
        input_ids, labels, counted = _own_rows(batch, order, mesh)
        # Each replica gets another dropout mask. A repeated step gets the same masks again.
        torch.manual_seed((order.seed + mesh.replica) % 2**63)
        if order.call == "evaluate":
            model.evaluate(input_ids, labels, counted)
        elif order.call == "loss_and_gradients":
            model.loss_and_gradients(input_ids, labels, order.names, counted)
        else:
            gets = _nothing_of_its_own if order.averaged else None
            model.inner_step(input_ids, labels, order.learning_rate, gets, counted)
            step_done()
            if not checked and (problem := model.compile_problem()) is not None:
                log.warning("%s", problem)
            checked = True


def _nothing_of_its_own(gradients: dict[str, Tensor]) -> None:
    """Do nothing: the first replica exchanges; `SiteModel.inner_step` passes on its gradients."""


def _own_rows(batch: Tensor, order: Order, mesh: SiteMesh) -> Rows:
    share = batch.shape[1] // mesh.replicas
    mine = batch[:, mesh.replica * share : (mesh.replica + 1) * share]
    behind = 2 + order.columns
    labels = mine[1:behind].transpose(0, 1) if order.columns else mine[1]
    if order.labels is None:
        return mine[0], labels, None
    positions = mine[behind] if order.positions else None
    return mine[0], labels, CountedLabels(order.labels, order.divisor, positions)


def _share_state(model: ReplicatedModel, mesh: SiteMesh, order: Order) -> None:
    """Copy the first replica's changed weights and optimizer state to the other replicas."""
    weights = list(model.local_tensors().values())
    from_first_replica(mesh, [weights[number] for number in order.weights])
    if order.optimizer:
        state = model.optimizer_state()
        on_device = {name: tensor.to(mesh.device) for name, tensor in state.items()}
        # Moments are the optimizer's own storage. Tensors that `to` has copied are loaded below.
        from_first_replica(mesh, list(on_device.values()))
        if mesh.replica > 0:
            model.load_optimizer_state(on_device)
    if mesh.replica > 0 and order.tied is not None:
        model.sync_tied(moments=order.tied == "moments")


def from_first_replica(mesh: SiteMesh, tensors: Sequence[Tensor]) -> None:
    """Set `tensors`, on the device, to the first replica's values. Collective over the replicas."""
    group = mesh.replica_group
    with torch.no_grad():
        works = [
            dist.broadcast(tensor, group=group, group_src=0, async_op=True)
            for tensor in tensors
            if tensor.numel() > 0
        ]
        for work in works:
            if work is not None:
                work.wait()


def _send(mesh: SiteMesh, order: Order) -> None:
    text = json.dumps(asdict(order)).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, group=mesh.orders, group_src=0)
    dist.broadcast(
        torch.frombuffer(bytearray(text), dtype=torch.uint8), group=mesh.orders, group_src=0
    )


def _receive(mesh: SiteMesh) -> Order:
    size = torch.zeros(1, dtype=torch.int64)
    try:
        dist.broadcast(size, group=mesh.orders, group_src=0)
        text = torch.empty(int(size.item()), dtype=torch.uint8)
        dist.broadcast(text, group=mesh.orders, group_src=0)
    except RuntimeError as error:
        raise TrainingError(
            f"replica {mesh.replica}: lost the rank of the first replica that gives orders; see "
            "that rank's own message"
        ) from error
    said: Mapping[str, object] = json.loads(text.numpy().tobytes())
    return Order(**{**said, "names": tuple(said["names"]), "weights": tuple(said["weights"])})  # type: ignore[arg-type]
