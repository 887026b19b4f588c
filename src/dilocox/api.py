"""The Python API: load a run file, train it, export and sample the model.

import dilocox
run = dilocox.load_run("run.toml", ["outer.rounds=20"])
result = dilocox.train(run, on_evaluation=lambda round_, loss: print(round_, loss))
dilocox.export(result.folder, "my-model")

`join` takes part in a run over a network as one site, with the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox.config.run_config import RunConfig, load_run, load_written, resolve_run
from dilocox.training.launch.join_token import read_token
from dilocox.training.run_model import export, generate, model_folder

if TYPE_CHECKING:
    from dilocox.inner.own_optimizer import OptimizerFactory
    from dilocox.training.builder import Dataset, Hooks, Loss
    from dilocox.training.launch.local import Result

__all__ = [
    "RunConfig",
    "code_digest",
    "export",
    "generate",
    "join",
    "load_run",
    "model_folder",
    "resolve_run",
    "train",
]


def train(
    config: RunConfig,
    *,
    dataset: Dataset | None = None,
    loss: Loss | None = None,
    validation: Dataset | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: Callable[[int, int], float] | None = None,
    on_evaluation: Callable[[int, float], object] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    debug: bool = False,
    trace: bool = False,
) -> Result:
    """Train a run with all of its sites as processes on this machine.

    Functions run in the ranks' processes, and what they print goes to `logs/` in the run folder,
    one file per rank.

    Args:
        dataset: `dataset(start, count)` gives sequences `start` up to `start + count` as int64
            [count, sequence_length + 1], a pure function that is the same at every site. Without
            it the token files of `[data]` are read; they are prepared in any case, since tokenizer
            and held-out text come from them.
        loss: `loss(logits [b, L, V], labels int64 [b, L])` is a mean over the micro-batch.
        validation: like `dataset`, asked once for sequences from 0 on: what evaluations read,
            instead of the held-out text. A loss for sequences of a form of their own needs it.
        optimizer: `optimizer(parameters)` makes a `torch.optim.Optimizer` of a rank's tensors by
            full name (fp32, this shard's rows). The run file needs `inner.optimizer = "sgd"`.
        schedule: `schedule(step, steps)` is the learning rate of an inner step, counted from 0, in
            a run of so many. Groups of an own optimizer keep their ratio of rates.
        on_evaluation: called with (round, held-out loss) in the process of the first rank of the
            first site. If it returns True, the run ends early, as if its steps were done: after
            the rounds that are planned already come the flush and the published model. The result
            is `finished`, and its reason says why.
        trace: write what every rank does when to `trace.json` in the run folder, a Chrome trace.

    Returns a `Result`; raises `DilocoxError`.
    """
    # Imported here: torch costs seconds, which loading a run file or showing help need not wait.
    from dilocox.training.launch.local import train_here

    hooks = _hooks(dataset, loss, validation, optimizer, schedule, on_evaluation)
    config = _with_permission(config, bool(hooks.replaced), resume)
    return train_here(config, hooks, resume=resume, overwrite=overwrite, debug=debug, trace=trace)


def join(
    config: RunConfig,
    *,
    site: str,
    address: str,
    token_file: str | Path | None = None,
    key_file: str | Path | None = None,
    dataset: Dataset | None = None,
    loss: Loss | None = None,
    validation: Dataset | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: Callable[[int, int], float] | None = None,
    on_evaluation: Callable[[int, float], object] | None = None,
    debug: bool = False,
    trace: bool = False,
) -> int:
    """Take part in a run over a network as `site`, as the command `dilocox join` does.

    The functions are those of `train`. All sites have to bring the same: the SHA-256 of their code
    (`code_digest`) stands in the run file of the coordinator and of all sites as `run.code`, and a
    site that brings others, or none, is refused. `on_evaluation` is no part of it; it is called at
    the site that evaluates, the first of the run.

    Args:
        address: HOST:PORT of the coordinator.
        token_file: file with the join token; without it the variable DILOCOX_TOKEN, or a prompt.
        key_file: where the site keeps its key, if not in its run folder.
        trace: write this site's timeline to `trace-SITE.json` in its run folder.

    Returns 0 when the run is done, 130 if this site was asked to go, and 1 if it failed; the line
    that says why is on standard error. Raises `DilocoxError` before the first start.
    """
    from dilocox.training.launch import local

    hooks = _hooks(dataset, loss, validation, optimizer, schedule, on_evaluation)
    token = read_token(None if token_file is None else Path(token_file))
    return local.join(
        config,
        site=site,
        address=address,
        token=token,
        debug=debug,
        trace=trace,
        key_file=None if key_file is None else Path(key_file),
        hooks=hooks,
    )


def code_digest(
    *,
    dataset: Dataset | None = None,
    loss: Loss | None = None,
    validation: Dataset | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: Callable[[int, int], float] | None = None,
) -> str:
    """What `run.code` has to be for these functions: SHA-256, hex, over the source of their
    modules.

    Modules that these import, and values that closures hold, are not part of it. Raises
    `ConfigError` for a function without a source file.
    """
    from dilocox.training import own_code

    hooks = _hooks(dataset, loss, validation, optimizer, schedule, None)
    return own_code.code_digest(hooks.functions)


def _hooks(
    dataset: Dataset | None,
    loss: Loss | None,
    validation: Dataset | None,
    optimizer: OptimizerFactory | None,
    schedule: Callable[[int, int], float] | None,
    on_evaluation: Callable[[int, float], Any] | None,
) -> Hooks:
    from dilocox.inner import mean_cross_entropy
    from dilocox.training.builder import Hooks

    return Hooks(
        dataset, loss or mean_cross_entropy, on_evaluation, validation, optimizer, schedule
    )


def _with_permission(config: RunConfig, replaced: bool, resume: bool) -> RunConfig:
    """`config` whose sites may have code of their own (`own_code`) if it is `replaced`.

    A run that is resumed goes on with the permissions that it was begun with.
    """
    permitted = {name for name, own in config.sites.items() if own.own_code}
    if resume and (config.folder / "run.toml").exists():
        begun = load_written(config.folder / "run.toml").sites
        permitted |= {name for name, own in begun.items() if own.own_code}
    elif replaced:
        permitted = set(config.sites)
    sites = {
        name: own.model_copy(update={"own_code": name in permitted})
        for name, own in config.sites.items()
    }
    return config.model_copy(update={"sites": sites})
