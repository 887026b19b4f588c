"""The processes of one site around a loop of the user's own: the first one is part of the run.

The user's program has formed PyTorch's default process group, in which `DistributedDataParallel`
averages gradients. Here the processes exchange reports and tensors, and learn of each other's
failures. No wait here is without end: a process that waits looks for failures of the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dilocox.errors import DilocoxError, TrainingError
from dilocox.utils.torch_internals import default_store

LOOK = 0.5
"""Seconds between two looks of a waiting process at the failures of the others."""
_FOREVER = timedelta(days=365)
_FAILED, _HEARD = "failed", "heard"
_numbers = iter(range(2**31))


@dataclass(frozen=True)
class Failure:
    """The first failure, or the first early end, of a process of the site."""

    reason: str
    """One line that begins with the process."""
    failed: bool
    """False: the user's loop has ended early without an error."""


def several_processes() -> bool:
    """Return whether the user's program has formed a process group of more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class SiteRanks:
    """Connects the processes of one site. Every process makes it at the same point."""

    def __init__(self, site: str) -> None:
        """`site`: name of the site, for messages."""
        self._me = f"site {site}"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._gone = False
        """Whether the store was found to be gone."""
        # Every process makes its sites in the same order.
        self.store = dist.PrefixStore(f"dilocox/site/{next(_numbers)}", default_store())

    def fail(self, reason: str, *, failed: bool) -> bool:
        """Tell the other processes that this one has failed, or has ended its loop early.

        Only the first such call of the site counts. Returns whether it was this one. It counts as
        the first one if the store is gone, so that this process shows its own error.
        """
        said = {"reason": f"process {self.rank}: {reason}", "failed": failed}
        try:
            if self.store.add("failures", 1) != 1:
                return False
            self.store.set(_FAILED, json.dumps(said))
        except RuntimeError:
            # The process that holds the store has ended, so nobody is left to be told.
            self._gone = True
        return True

    def failure(self) -> Failure | None:
        """Return the failure that `fail` has told, if there is one."""
        try:
            if not self.store.check([_FAILED]):
                return None
            said = json.loads(self.store.get(_FAILED))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            return Failure(f"the store of its processes is gone ({reason})", True)
        return Failure(str(said["reason"]), bool(said["failed"]))

    def acknowledge(self) -> None:
        """Tell the process that has failed that the coordinator knows. Called by the first one."""
        # Without the store the other processes have ended, or learn of this one's end by their
        # connections.
        with contextlib.suppress(RuntimeError):
            self.store.set(_HEARD, "1")

    def wait_until_heard(self, seconds: float) -> None:
        """Wait until the first process has told the coordinator of a failure, or for `seconds`.

        A launcher ends all processes as soon as one has ended.
        """
        end = time.monotonic() + seconds
        # The store may end with the first process, which then has told the coordinator.
        with contextlib.suppress(RuntimeError):
            while not self._gone and not self.store.check([_HEARD]) and time.monotonic() < end:
                time.sleep(0.05)

    def agree(self, error: DilocoxError | None) -> None:
        """Go on only if no process has an error. Collective.

        Raises `error` in the process that has it, and `TrainingError` with its line in the others.
        """
        if error is not None:
            self.fail(str(error), failed=True)
        failed = torch.tensor([0 if error is None else 1])
        self._wait(dist.all_reduce(failed, group=self._group, async_op=True))
        if error is not None:
            raise error
        if int(failed):
            found = self.failure()
            reason = "another process has failed" if found is None else found.reason
            raise TrainingError(f"{self._me}: {reason}")

    def combined(
        self, loss: Tensor | float, tokens: int | None
    ) -> tuple[Tensor | float, int | None]:
        """Return the site's loss and its tokens of one step. Collective.

        The loss is the mean over the processes, weighted by tokens if all processes give tokens.
        `tokens` are added up. The host does not wait for a loss on a GPU.
        """
        counts = torch.tensor([tokens or 0, 0 if tokens is None else 1], dtype=torch.int64)
        self._wait(dist.all_reduce(counts, group=self._group, async_op=True))
        total, told = counts.tolist()
        weighs = told == self.world and total > 0
        share = (tokens or 0) / total if weighs else 1 / self.world
        part = torch.as_tensor(loss).detach().double().reshape(()) * share
        if part.device.type == "cpu":
            self._wait(dist.all_reduce(part, group=self._group, async_op=True))
        else:
            dist.all_reduce(part)
        return part, (total if told else None)

    def send(self, values: Sequence[float]) -> None:
        """Send numbers from the first process to the others, which call `receive`."""
        self._numbers(torch.tensor(list(values), dtype=torch.float64))

    def receive(self, count: int) -> list[float]:
        """Return the `count` numbers that the first process sends."""
        found = torch.empty(count, dtype=torch.float64)
        self._numbers(found)
        return list(found.tolist())

    def _numbers(self, tensor: Tensor) -> None:
        self._wait(dist.broadcast(tensor, 0, group=self._group, async_op=True))

    def check_same(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raise `TrainingError` if the processes' tensors differ by name or shape. Collective."""
        text = json.dumps([[name, list(tensor.shape)] for name, tensor in tensors])
        # 48 bits are a whole number in fp64.
        number = float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))
        smallest, largest = self._ends(torch.tensor(number, dtype=torch.float64))
        if smallest != largest:
            raise TrainingError(
                f"{self._me}: its processes have models of different tensors; build the same model "
                "in all of them"
            )

    def _ends(self, number: Tensor) -> tuple[float, float]:
        """Return the smallest and the largest of the processes' numbers. Collective."""
        ends = torch.stack([-number, number]).detach()
        self._wait(dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._group, async_op=True))
        return -float(ends[0]), float(ends[1])

    def check_equal(self, tensors: Iterable[Tensor]) -> None:
        """Raise `TrainingError` if the processes hold other tensors than the first. Collective.

        The norms are compared, in fp64.
        """
        norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
        smallest, largest = self._ends(torch.stack(norms).square().sum().sqrt().cpu())
        if largest - smallest > 1e-9 * abs(largest):
            raise TrainingError(
                f"{self._me}: its processes hold different tensors (norms {smallest:.9g} to "
                f"{largest:.9g}); wrap the model in DistributedDataParallel, and call optimizer "
                "and site.step in all processes alike"
            )

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Write the tensors of the first process into those of the others. Collective."""
        works = []
        with torch.no_grad():
            for tensor in tensors:
                if tensor.device.type == "cpu":
                    works.append(dist.broadcast(tensor, 0, group=self._group, async_op=True))
                else:
                    dist.broadcast(tensor, 0)
        for work in works:
            self._wait(work)

    def share_state(self, state: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the named tensors of the first process, on the CPU. Collective.

        `state`: the tensors; None in the other processes.
        """
        form = [
            (name, str(each.dtype).removeprefix("torch."), list(each.shape))
            for name, each in (state or {}).items()
        ]
        text = bytearray(json.dumps(form).encode())
        (size,) = self._told([len(text)])
        document = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            document = torch.frombuffer(text, dtype=torch.uint8)
        self.share([document])
        found = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in json.loads(document.numpy().tobytes())
        }
        for name, tensor in (state or {}).items():
            found[name].copy_(tensor)
        self.share(list(found.values()))
        return found

    def _told(self, values: Sequence[float]) -> list[float]:
        """Return the first process's `values`."""
        if self.rank == 0:
            self.send(values)
            return list(values)
        return self.receive(len(values))

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for a collective. Raises `TrainingError` if another process has failed."""
        assert work is not None
        while True:
            # A wait that takes too long raises an error, and can be repeated.
            ended = work.is_completed()
            try:
                work.wait(_FOREVER if ended else timedelta(seconds=LOOK))
                return
            except RuntimeError as error:
                found = self.failure()
                if found is not None:
                    raise TrainingError(f"{self._me}: {found.reason}") from None
                if ended:
                    said = str(error).partition("\n")[0]
                    raise TrainingError(
                        f"{self._me}: another of its processes is gone ({said}); look at its output"
                    ) from None
