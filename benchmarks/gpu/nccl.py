"""NCCL on one GPU: FSDP2 on a group of one rank, and what a rank does whose peer dies."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu import product, sizes
from benchmarks.gpu.child import Context, Outcome
from benchmarks.gpu.clock import wait

PATIENCE = 20.0
"""Seconds within which the remaining rank must end."""
REFUSED = 17
"""Exit code of a rank whose group NCCL does not form. Two ranks on one GPU need NCCL 2.30."""


def run(context: Context) -> None:
    """Measure two rows: one rank under FSDP2, and a peer that dies in a collective."""
    context.check("nccl, one rank", lambda: _one_rank(context.scale))
    context.check("nccl, a peer dies", lambda: _peer_dies(context.folder))


def _one_rank(scale: str) -> Outcome:
    """Train a chunk in bf16 under FSDP2 on a mesh of one rank, with a second group, and end
    both."""
    cuda, began = scale == "gpu", time.monotonic()
    if cuda:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1,
        device_id=torch.device("cuda", 0) if cuda else None, timeout=timedelta(seconds=60),
    )  # fmt: skip
    gradients = product.sharded_gradients(sizes.STEP[scale], cuda)
    ok = all(g.dtype == torch.float32 and bool(g.isfinite().all()) for g in gradients)
    one = torch.ones(1, device="cuda" if cuda else "cpu")
    dist.all_reduce(one, group=dist.new_group([0]))
    wait(cuda)
    leaving = time.monotonic()
    dist.destroy_process_group()
    found = {"seconds": leaving - began, "destroy_seconds": time.monotonic() - leaving}
    return Outcome(ok, f"{len(gradients)} gradients in fp32, compute in bf16", found)


def _peer_dies(folder: Path) -> Outcome:
    """Start two ranks on this GPU. Rank 1 ends hard while rank 0 is in a collective."""
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    logs = [(folder / f"peer-{rank}.log").open("wb") for rank in (0, 1)]
    peers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.nccl", str(rank), str(meeting)],
            stdout=logs[rank], stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        second = peers[1].wait(40.0)
        died = time.monotonic()
        if second == REFUSED:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            return Outcome(None, f"NCCL {version} takes no two ranks on one GPU", {"possible": 0})
        try:
            code = peers[0].wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"the rank that is left hangs for {PATIENCE:.0f} s", {})
        took = time.monotonic() - died
        return Outcome(code != 0, "", {"seconds_to_exit": took, "exit": code, "possible": 1})
    finally:
        for peer, log in zip(peers, logs, strict=True):
            with contextlib.suppress(ProcessLookupError):
                peer.kill()
            peer.wait()
            log.close()


def peer(rank: int, meeting: str) -> int:
    """Run one of two ranks. Rank 0 ends as a rank of a run does after an error."""
    torch.cuda.set_device(0)
    try:
        dist.init_process_group(
            "nccl", store=dist.FileStore(meeting, 2), rank=rank, world_size=2,
            device_id=torch.device("cuda", 0), timeout=timedelta(seconds=10),
        )  # fmt: skip
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(REFUSED)
    if rank == 1:
        os._exit(9)
    try:
        work = dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
        assert work is not None
        work.wait()
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(error, flush=True)
        product.end_rank_after_error()
    return 1


if __name__ == "__main__":
    sys.exit(peer(int(sys.argv[1]), sys.argv[2]))
