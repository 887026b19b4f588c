"""`dilocox` processes forked from one interpreter, which costs 0.1 s where a fresh one costs 3.

python -m tests.support.forked reads one JSON line per process from stdin: `arguments` of the
command line, `hooks` (see `hooks_of`), `log`, the run's `folder`, more variables of the
`environment` and perhaps the network `namespace` that it runs in. Every process gets a group of its
own, as a terminal gives it, so that a signal to the group is Ctrl-C. What such a process leaves
behind becomes a child of this one; when all are gone, `LOG.gone` says how they ended.

Tests use `tests.support.forge`, which does not import torch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import json
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - imported once, for all
from torch.distributed.run import main as torchrun

import dilocox.api
from dilocox.cli import main as cli
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.inner import SiteModel, determinism_mode, mean_cross_entropy
from dilocox.models.weight_source import FreshWeights
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.snapshot import Snapshot
from dilocox.tools.testbed.netns import enter_namespace
from dilocox.training import (
    checkpoint_io,
    run_model,  # noqa: F401 - imported once, for all
)
from dilocox.training.builder import Batches, Hooks, Sequences
from dilocox.training.checkpointing import Checkpointer
from dilocox.training.launch import local
from dilocox.transport.groups import PeerGroup
from dilocox.transport.state_transfer import Donor
from tests.support.altered import (
    contributions_times,
    holds_only_its_own,
    saw_other_payloads,
    spoils_what_it_sends,
)
from tests.support.dying import die
from tests.support.own_functions import FUNCTIONS, enough, on_evaluation
from tests.support.own_loop import adamw
from tests.support.streams import play_device

_SET_CHILD_SUBREAPER = 36
STEP_CALLS = 2
"""Calls of a loss per inner step: micro-batches of the harness's run file."""
STEPS = 8
"""Inner steps per round of the harness's run file."""


def me() -> str:
    """`SITE-stageI-shardJ`: the rank whose process this is."""
    return multiprocessing.current_process().name


def sick_at(site: str, *rounds: int, inner_steps: int = STEPS) -> dict[str, Any]:
    """A loss that is NaN in the second step of these rounds at one site."""
    calls = 0

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        value = mean_cross_entropy(logits, labels)
        # Evaluations are without gradients, and at the first site only.
        if not torch.is_grad_enabled() or not me().startswith(site):
            return value
        step, calls = calls // STEP_CALLS, calls + 1
        bad = step % inner_steps == 1 and step // inner_steps in rounds
        return value * float("nan") if bad else value

    return {"loss": loss}


def poisoned_at(site: str, *rounds: int) -> dict[str, Any]:
    """Tokens below 250, and a NaN in the embedding of token 299 during these rounds.

    No input has that token, so losses and gradients stay finite: the pseudo-gradient does not.
    """
    steps = 0
    found: set[torch.nn.Parameter] = set()

    def remember(module: torch.nn.Module, _: object, __: object) -> None:
        if isinstance(module, torch.nn.Embedding) and module.weight.shape == (300, 32):
            found.add(module.weight)

    # A run freezes the garbage collector's objects, so the collector no longer lists them.
    torch.nn.modules.module.register_module_forward_hook(remember)

    def dataset(start: int, count: int) -> Sequences:
        nonlocal steps
        step, steps = steps, steps + 1
        if me() == f"{site}-stage0-shard0" and step % STEPS == 1 and step // STEPS in rounds:
            assert found
            for parameter in found:
                parameter.data[299, 3] = float("nan")
        numbers = np.arange(start, start + count)
        return np.stack([np.random.default_rng(n).integers(0, 250, 33) for n in numbers])

    return {"dataset": dataset}


def small_disk() -> dict[str, Any]:
    """The folder of checkpoints gets a file system with room for the first checkpoint only.

    A file stands where the first model folder is to be.
    """

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if me() == "paris-stage1-shard0" and torch.is_grad_enabled() and not _disk.exists():
            _disk.mkdir()
            _disk.with_name("model-tick-00000008").write_text("in the way")
            mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(_disk)]
            subprocess.run(mount, check=True)
        return mean_cross_entropy(logits, labels)

    return {"loss": loss}


def donor_dies() -> dict[str, Any]:
    """The first rank of paris that gives a site something dies of it, once per run."""
    original = Donor.offer

    def offer(self: Donor, snapshot: Snapshot) -> None:
        flag = _disk.with_name("donor-died")
        # At the start of a run the founder gives theta_0 to all.
        if me().startswith("paris") and snapshot.tick > 0 and not flag.exists():
            flag.touch()
            die()
        original(self, snapshot)

    Donor.offer = offer  # type: ignore[method-assign]
    return {}


def replica_dies() -> dict[str, Any]:
    """A rank of lyon's second replica dies after its twelfth inner step, once per run."""
    original, steps = SiteModel.inner_step, 0

    @functools.wraps(original)
    def inner_step(self: SiteModel, *arguments: Any) -> Any:
        nonlocal steps
        result, steps = original(self, *arguments), steps + 1
        flag = _disk.with_name("replica-died")
        if me() == "lyon-stage0-shard0-replica1" and steps == 12 and not flag.exists():
            flag.touch()
            die()
        return result

    SiteModel.inner_step = inner_step  # type: ignore[method-assign]
    return {}


def late_at_the_flush() -> dict[str, Any]:
    """The last checkpoint of paris, the first site, takes until the others go on without it."""
    original = Checkpointer.save

    def save(self: Checkpointer, own: Any, plan: Any, *, last: bool = False) -> None:
        original(self, own, plan, last=last)
        told, end = _disk.with_name("metrics.jsonl"), time.monotonic() + 60.0
        while last and me().startswith("paris") and "paris is left behind" not in told.read_text():
            assert time.monotonic() < end, "nobody goes on without paris"
            self._touch()
            time.sleep(0.05)

    Checkpointer.save = save  # type: ignore[method-assign]
    return {}


def paced() -> dict[str, Any]:
    """An inner step takes 40 ms or longer, so that on a fast machine, too, a run has few rounds
    between a signal and the stop."""
    original = SiteModel.inner_step

    @functools.wraps(original)
    def inner_step(self: SiteModel, *arguments: Any) -> Any:
        end = time.monotonic() + 0.04
        result = original(self, *arguments)
        time.sleep(max(0.0, end - time.monotonic()))
        return result

    SiteModel.inner_step = inner_step  # type: ignore[method-assign]
    return {}


def slow_steps() -> dict[str, Any]:
    """An inner step takes .3 s, as on hardware and models of some size."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            time.sleep(0.3 / STEP_CALLS)
        return mean_cross_entropy(logits, labels)

    return {"loss": loss}


def lacks_a_kernel() -> dict[str, Any]:
    """As on a GPU: an operation of the last stage has no deterministic kernel."""
    determinism_mode.lacks_kernels = lambda device: True
    silu = torch.nn.functional.silu

    def writes(values: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        if "stage1" in me():
            torch.zeros(3).put_(torch.tensor([1]), torch.tensor([1.0]))
        return silu(values, *more, **options)

    torch.nn.functional.silu = writes
    return {}


def out_of_memory() -> dict[str, Any]:
    """As on a GPU that is too small: the last stage of lyon cannot take its first step."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and me().startswith("lyon"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return mean_cross_entropy(logits, labels)

    return {"loss": loss}


def lazy_and_poisoning() -> dict[str, Any]:
    """Oslo contributes nothing, and rome the opposite of what it has learned, ten times."""
    contributions_times({"oslo": 0.0, "rome": -10.0})
    return {}


def skipping() -> dict[str, Any]:
    """Oslo leaves out every second inner step, and says that it has taken all."""
    original, steps, last = SiteModel.inner_step, 0, None

    @functools.wraps(original)
    def inner_step(self: SiteModel, *arguments: Any) -> Any:
        nonlocal steps, last
        steps += 1
        if last is None or not me().startswith("oslo") or steps % 2:
            last = original(self, *arguments)
        return last

    SiteModel.inner_step = inner_step  # type: ignore[method-assign]
    return {}


def poisoning() -> dict[str, Any]:
    """Rome contributes the opposite of what it has learned, ten times."""
    contributions_times({"rome": -10.0})
    return {}


def other_start() -> dict[str, Any]:
    """Paris, which founds the run, makes another theta_0 than the others."""
    made = FreshWeights.tensor

    def tensor(self: FreshWeights, full_name: str) -> torch.Tensor:
        value = made(self, full_name)
        return value * 1.5 + 0.01 if me().startswith("paris") else value

    FreshWeights.tensor = tensor  # type: ignore[method-assign]
    return {}


def censoring() -> dict[str, Any]:
    """Rome is `poisoning`, and says that it holds nobody else's contribution."""
    holds_only_its_own("rome")
    return poisoning()


def slighting() -> dict[str, Any]:
    """What rome sends to lyon is damaged."""
    spoils_what_it_sends("rome", "lyon")
    return {}


def slandering() -> dict[str, Any]:
    """Rome is `poisoning`, and says that the others send different sites different things."""
    saw_other_payloads("rome")
    return poisoning()


def other_lyon() -> dict[str, Any]:
    """Lyon contributes half as much again as it has learned."""
    contributions_times({"lyon": 1.5})
    return {}


def false_donor() -> dict[str, Any]:
    """Paris gives another anchor than its own to who enters, and rome, which denies the others'
    contributions, enters again and again."""
    holds_only_its_own("rome")
    original = Donor.offer

    def offer(self: Donor, snapshot: Snapshot) -> None:
        if me().startswith("paris") and snapshot.tick > 0:
            false = {**snapshot.tensors, "anchor": snapshot.tensors["anchor"] * 0.5}
            snapshot = dataclasses.replace(snapshot, tensors=false)
        original(self, snapshot)

    Donor.offer = offer  # type: ignore[method-assign]
    return {}


def played_device() -> dict[str, Any]:
    """The CPU is taken for a device with streams."""
    play_device(pytest.MonkeyPatch())
    return {}


PLACES: dict[str, tuple[Any, str]] = {
    "step": (Batches, "step"),
    "load": (checkpoint_io, "_sha256"),
    "write": (checkpoint_io.dcp, "save"),
    "send": (PeerGroup, "send"),
    "vote": (CoordinatorClient, "vote"),
    "landing": (FragmentState, "land"),
}
"""What `killed_at` counts. Behind `dcp.save` a checkpoint has its tensors and is not whole yet;
behind `send` a payload travels."""


def killed_at(place: str, number: int, rank: str) -> dict[str, Any]:
    """SIGKILL for the whole run, right behind the call `number`, from 1, of `place` at `rank`."""
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        result = original(*arguments, **more)
        if me() == rank:
            calls += 1
            if calls == number:
                os.killpg(0, signal.SIGKILL)
        return result

    setattr(owner, name, counted)
    return {}


def hooks_of(text: str) -> dict[str, Any]:
    """By a name of `HOOKS`, or `kill/PLACE/NUMBER/RANK`."""
    kind, *words = text.split("/")
    if kind == "kill":
        place, number, rank = words
        return killed_at(place, int(number), rank)
    return HOOKS[kind]()


_disk = Path()
"""The checkpoint folder of the run that this process trains."""

HOOKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "sick-once": functools.partial(sick_at, "lyon", 1),
    "sick-twice": functools.partial(sick_at, "lyon", 2, 3),
    "sick-alone": functools.partial(sick_at, "paris", 1),
    "small-disk": small_disk,
    "poisoned": functools.partial(poisoned_at, "lyon", 1),
    "poisoned-alone": functools.partial(poisoned_at, "paris", 1),
    "lazy-and-poisoning": lazy_and_poisoning,
    "skipping": skipping,
    "poisoning": poisoning,
    "other-lyon": other_lyon,
    "censoring": censoring,
    "slandering": slandering,
    "slighting": slighting,
    "donor-dies": donor_dies,
    "false-donor": false_donor,
    "replica-dies": replica_dies,
    "paced": paced,
    "slow-steps": slow_steps,
    "late-at-the-flush": late_at_the_flush,
    "other-start": other_start,
    "played-device": played_device,
    "lacks-a-kernel": lacks_a_kernel,
    "out-of-memory": out_of_memory,
    "adamw": lambda: {"optimizer": adamw},
    "own-functions": lambda: {**FUNCTIONS, "on_evaluation": on_evaluation},
    "own-functions-enough": lambda: {**FUNCTIONS, "on_evaluation": enough},
}


def main() -> None:
    """Fork what is asked for until stdin ends."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    running: dict[int, Path] = {}
    codes: dict[str, int] = {}
    while True:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _run(order)
            log = Path(order["log"])
            running[pid] = log
            _write(log.with_suffix(".pid"), str(pid))
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                codes[str(ended[0])] = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            pass
        # A group is empty when its leader and all whom it has left are gone and waited for.
        for pid, log in list(running.items()):
            if str(pid) in codes and not _group(pid):
                _write(log.with_suffix(".gone"), json.dumps(codes))
                del running[pid]
                codes = {} if not running else codes
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def _group(leader: int) -> list[int]:
    """Processes of a group, zombies included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[2]) == leader:
                found.append(int(entry.name))
    return found


def _run(order: dict[str, Any]) -> None:
    global _disk
    gc.freeze()  # a collection of what was imported would take longer than many a run's set-up
    _disk = Path(order["folder"]) / "checkpoints"
    os.setpgid(0, 0)
    os.environ.update(order["environment"])
    if order["namespace"]:
        enter_namespace(order["namespace"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for new, old in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(new, old)
    code: Any = 1
    try:
        hooks = hooks_of(order["hooks"])
        dilocox.api.train = functools.partial(dilocox.api.train, **hooks)
        if order["arguments"][0] == "join" and hooks:
            local.join = functools.partial(local.join, hooks=Hooks(**hooks))
        program, *words = order["arguments"]
        if program == "torchrun":
            torchrun(words)
            code = 0
        elif program == "python":
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
            code = 0
        else:
            cli.main(order["arguments"])
    except SystemExit as end:
        code = end.code
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
    os._exit(0)  # taking torch and transformers down takes seconds
