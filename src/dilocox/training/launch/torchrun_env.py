"""Environment variables of ranks that a launcher has started: torchrun or Slurm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from dilocox.errors import JoinError


@dataclass(frozen=True)
class RankVariables:
    """The launcher's variables for this process, named as in torchrun."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    master_address: str
    master_port: str
    own_gpu: bool = False
    """Whether this process sees only one GPU, as with `srun --gpus-per-task=1`."""

    @property
    def device_number(self) -> int:
        """Number of this rank's GPU among the GPUs that the process sees."""
        return 0 if self.own_gpu else self.local_rank

    def export(self) -> None:
        """Set the variables that `torch.distributed` reads."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world),
            LOCAL_RANK=str(self.local_rank),
            MASTER_ADDR=self.master_address,
            MASTER_PORT=self.master_port,
        )


def rank_variables(environment: Mapping[str, str] | None = None) -> RankVariables | None:
    """Return the launcher's variables. None if no launcher has started this process.

    torchrun's variables are tried first. Slurm's variables only count inside `srun`: a batch
    script and a shell by `srun --pty` have them, too, but are no ranks. Slurm's ranks meet at the
    first node of the step, on a port that is computed from the numbers of job and step.

    `environment`: None means the process's environment. Raises `JoinError` for variables that are
    not numbers.
    """
    env = os.environ if environment is None else environment
    seen = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    try:
        if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
            return RankVariables(
                int(env["RANK"]),
                int(env["WORLD_SIZE"]),
                int(env["LOCAL_RANK"]),
                int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
                env["MASTER_ADDR"],
                env["MASTER_PORT"],
                len(seen) == 1,
            )
        if {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"} <= env.keys():
            if env.get("SLURM_STEP_ID", "").startswith("429496"):
                return None  # the batch or extern step of a job, not a step of ranks
            world = int(env["SLURM_STEP_NUM_TASKS"])
            if world == 1 and "SLURM_PTY_PORT" in env:
                return None  # an interactive shell by `srun --pty`
            nodes = max(1, int(env.get("SLURM_STEP_NUM_NODES", "1")))
            # Two sites may be two steps of one job on the same first node: their ports must differ.
            port = int(env.get("SLURM_JOB_ID", "0")) + 251 * int(env.get("SLURM_STEP_ID", "0"))
            return RankVariables(
                int(env["SLURM_PROCID"]),
                world,
                int(env["SLURM_LOCALID"]),
                max(1, world // nodes),
                env.get("MASTER_ADDR") or _first_node(env.get("SLURM_STEP_NODELIST", "")),
                env.get("MASTER_PORT") or str(20000 + port % 12000),
                len(seen) == 1,
            )
    except ValueError as error:
        raise JoinError(f"launcher variables: {error}; start the ranks with torchrun") from None
    return None


def _first_node(nodes: str) -> str:
    if "[" not in nodes:
        return nodes.split(",", maxsplit=1)[0] or "127.0.0.1"
    try:
        answer = subprocess.run(  # noqa: S603 - a list, no shell
            ["scontrol", "show", "hostnames", nodes],  # noqa: S607 - wherever Slurm is
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        raise JoinError(
            f"Slurm nodes {nodes!r}: scontrol cannot list them; set MASTER_ADDR to the first node"
        ) from None
    return answer.stdout.split()[0]
