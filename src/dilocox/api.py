"""The Python API: load a run file, train it, export and sample the model.

import dilocox
run = dilocox.load_run("run.toml", ["outer.rounds=20"])
result = dilocox.train(run, on_evaluation=lambda round_, loss: print(round_, loss))
dilocox.export(result.folder, "my-model")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dilocox.config import RunConfig, load_run, load_written, resolve_run
from dilocox.model_files import export, generate, model_folder

if TYPE_CHECKING:
    from dilocox.assembly import Dataset, Loss
    from dilocox.launch import Result

__all__ = [
    "RunConfig",
    "export",
    "generate",
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
    on_evaluation: Callable[[int, float], None] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    debug: bool = False,
    trace: bool = False,
) -> Result:
    """Train a run with all of its sites as processes on this machine.

    `dataset(start, count)` gives sequences `start` up to `start + count` as int64
    [count, sequence_length + 1], a pure function that is the same at every site; without it the
    token files of `[data]` are read (they are prepared in any case: tokenizer and held-out text
    come from them). `loss(logits [b, L, V], labels int64 [b, L])` is a mean over the micro-batch.
    `on_evaluation(round, held-out loss)` is called in the process of the first rank of the first
    site. Functions run in the ranks' processes. `trace` writes what every rank does when to
    `trace.json` in the run folder, a Chrome trace. Returns a `Result`; raises `DilocoxError`.
    """
    # Imported here: torch costs seconds, which loading a run file or showing help need not wait.
    from dilocox.assembly import Hooks
    from dilocox.launch import train_here
    from dilocox.site import mean_cross_entropy

    hooks = Hooks(dataset, loss or mean_cross_entropy, on_evaluation)
    config = _with_permission(config, bool(hooks.replaced), resume)
    return train_here(config, hooks, resume=resume, overwrite=overwrite, debug=debug, trace=trace)


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
