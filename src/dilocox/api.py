"""The Python API: load a run file, train it, export and sample the model.

import dilocox
run = dilocox.load_run("run.toml", ["outer.rounds=20"])
result = dilocox.train(run, on_evaluation=lambda round_, loss: print(round_, loss))
dilocox.export(result.folder, "my-model")

`join` takes part in a run over a network as one site, with the same functions. `site` takes part
with a training loop of your own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox.config.run_config import RunConfig, load_run, load_written, resolve_run
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.training.launch.join_token import read_token
from dilocox.training.run_model import export, generate, model_folder

if TYPE_CHECKING:
    import torch

    from dilocox.inner.loop_optimizers import Stateful
    from dilocox.inner.own_optimizer import OptimizerFactory
    from dilocox.loop import Site
    from dilocox.training.builder import Dataset, Hooks, Loss
    from dilocox.training.launch.local import Result
    from dilocox.training.loop.model import Evaluation
    from dilocox.training.tasks.own_function import Score

__all__ = [
    "RunConfig",
    "code_digest",
    "evaluate",
    "export",
    "generate",
    "join",
    "load_run",
    "model_folder",
    "resolve_run",
    "site",
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
    evaluation: Score | None = None,
    resume: bool = False,
    overwrite: bool = False,
    debug: bool = False,
    trace: bool = False,
) -> Result:
    """Train a run with all of its sites as processes on this machine.

    The functions that are given run in the ranks' processes. Their output goes to `logs/` in the
    run folder, one file per rank.

    Args:
        config: the run, as `load_run` or `resolve_run` returns it.
        dataset: `dataset(start, count)` returns the sequences `start` to `start + count - 1` as
            int64 [count, sequence_length + 1]. It must be a pure function and return the same at
            every site. Without it, the token files of `[data]` are read. Token files are prepared
            in any case, since tokenizer and held-out text come from them.
        loss: `loss(logits [b, L, V], labels int64 [b, L])` returns the mean over the micro-batch,
            or (sum, count): the sums of the site's batch are then divided by its counts. Labels
            that do not count are -100.
            A parameter named `columns` gets `data.columns` by name, float32 [b, L] each.
        validation: a function like `dataset`. It is called once, for sequences from 0 on, and
            evaluations read these sequences instead of the held-out text. Give this function if
            your `loss` expects sequences of its own format.
        optimizer: `optimizer(parameters)` returns a `torch.optim.Optimizer` for a rank's tensors.
            `parameters` maps full names to tensors (fp32, this shard's rows). The run file needs
            `inner.optimizer = "sgd"`.
        schedule: `schedule(step, steps)` returns the learning rate of inner step `step`, counted
            from 0, in a run of `steps` inner steps. Parameter groups of an optimizer of your own
            keep the ratio of their learning rates.
        on_evaluation: called with (round, held-out loss) in the process of the first rank of the
            round's first site. If it returns True, the run ends early, as if all its steps were
            done. The rounds that are already planned are trained first; then the flush is applied
            and the model is published. The result is `finished`, and its reason says why.
        evaluation: `evaluation(model, tokenizer)` returns figures by name. It is one more task of
            `evaluation.tasks`: a process beside training calls it with the shared model as
            transformers or PEFT loads it, every `evaluation.tasks_every` rounds and at the end. It
            must be defined at the top level of a .py file.
        resume: go on from the last checkpoint of the run folder.
        overwrite: replace an earlier run in the same folder. Token files in the folder are kept if
            they fit the run, and made again if not.
        debug: write more to the logs.
        trace: write a timeline of every rank to `trace.json` in the run folder, as a Chrome trace.

    Returns:
        How the run ended.

    Raises:
        DilocoxError: the run cannot be started, or it failed.
    """
    # Imported here: importing torch takes seconds, and loading a run file or showing help does
    # not need it.
    from dilocox.training.launch.local import train_here

    config = _with_function(config, evaluation)
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
    evaluation: Score | None = None,
    debug: bool = False,
    trace: bool = False,
) -> int:
    """Take part in a run over a network as `site`, as the command `dilocox join` does.

    The functions are those of `train`, and all sites must use the same functions. The run file of
    the coordinator and of every site has the SHA-256 of their code (`code_digest`) as `run.code`.
    A site with other functions, or with none, is refused. Instead, the run file may name a file
    with the functions (`site.code`). `on_evaluation` is not part of this digest. It is called at
    the site that evaluates, which is the first site of the round's plan. `evaluation` is not part
    of the digest either, and is called at `evaluation.tasks_site`.

    Args:
        config: the run, as `load_run` returns it.
        site: name of this site in the run file.
        address: HOST:PORT of the coordinator.
        token_file: file with the join token. Without it, the environment variable DILOCOX_TOKEN
            is read; without that, the token is asked for at the terminal.
        key_file: file in which the site keeps its key. By default the file is in its run folder.
        debug: write more to the logs.
        trace: write this site's timeline to `trace-SITE.json` in its run folder.

    Returns:
        0 if the run is finished, 130 if this site was asked to leave, 1 if the site failed. The
        reason is printed to standard error.

    Raises:
        DilocoxError: the site cannot be started.
    """
    from dilocox.training.launch import local

    config = _with_function(config, evaluation)
    hooks = _hooks(dataset, loss, validation, optimizer, schedule, on_evaluation)
    token = read_token(None if token_file is None else Path(token_file))
    return local.join(
        config,
        site=site,
        endpoint=Endpoint.at(address, site, token, None if key_file is None else Path(key_file)),
        debug=debug,
        trace=trace,
        hooks=hooks,
    )


def site(
    run: RunConfig | str | Path,
    *,
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    address: str | None = None,
    token_file: str | Path | None = None,
    evaluation: Evaluation | None = None,
    state: Mapping[str, Stateful] | None = None,
    quiet: bool = False,
) -> Site:
    """Take part in a run as one site, with a training loop of your own.

    The result is a context manager. Entering it joins the run and writes the run's weights into
    `model`. Within the context, the loop calls `step` once after each optimizer step. The run file
    needs `own_code = true` for the site, and `inner.optimizer = "sgd"`. The site may have several
    processes on one machine, which all call this function alike, with a model in
    `DistributedDataParallel`, or divided by `fully_shard`.

    Args:
        run: the run, or the path of its run file.
        name: name of this site in the run file.
        model: the model, with trained tensors in fp32 on one device, of the names and shapes that
            `[model]` of the run file has.
        optimizer: the loop's optimizer, or a list of several. Together they hold every trained
            tensor once.
        address: HOST:PORT of the coordinator. None: the coordinator runs on this machine, in the
            same run folder.
        token_file: file with the join token, for `address`. Without it, the environment variable
            DILOCOX_TOKEN is read, as in `join`.
        evaluation: `evaluation(model, inputs, labels)` returns the mean loss of int64 [b, L] inputs
            and labels. None: the mean cross-entropy of the model's logits. In a run without text
            (`data.own`), `evaluation(model)` returns the mean loss of held-out data of the loop's
            own; None: the run has no held-out losses.
        state: further objects with `state_dict` and `load_state_dict`, by name, which checkpoints
            keep: schedulers, data loaders, gradient scalers.
        quiet: print nothing. Otherwise the lines of `dilocox join` go to standard error. A program
            with handlers for `logging` gets them as records of `dilocox.site` in both cases.

    Returns:
        The site, see `Site`.

    Raises:
        DilocoxError: the site cannot take part.
    """
    from dilocox import loop
    from dilocox.training.launch.own_site import endpoint_of

    config = run if isinstance(run, RunConfig) else load_run(run)
    parts = loop.own_loop(model, optimizer, evaluation, state)
    endpoint = functools.partial(endpoint_of, config, name, address, token_file)
    return loop.site_of(config, name, parts, endpoint, quiet)


def evaluate(
    models: Sequence[str | Path] | str | Path,
    tasks: Sequence[str] | str,
    *,
    limit: int = 0,
    fewshot: int | None = None,
    chat: bool = False,
    device: str = "cpu",
) -> dict[str, dict[str, Any]]:
    """Evaluate models on tasks of lm-eval, and return lm-eval's results by model.

    Tasks of lm-eval need the extra `[eval]`. Nothing is written. The run file's `evaluation.tasks`
    evaluates while a run trains.

    Args:
        models: one or several run folders or Hugging Face folders.
        tasks: names that lm-eval knows, paths of task files in YAML, folders with such files, or
            functions of your own, `FILE.py:FUNCTION`.
        limit: most examples of each task; 0: all.
        fewshot: examples in each prompt; None: as the task says.
        chat: whether prompts are written with the model's chat template.
        device: PyTorch's name of a device.

    Raises:
        CheckpointError: there is no model, or a model cannot be loaded.
        ConfigError: lm-eval is not installed, a task is unknown, its data cannot be loaded, or the
            device is not there.
        EvaluationError: lm-eval fails.
    """
    from dilocox.training.tasks.harness import TaskOptions, evaluate_models

    given = [models] if isinstance(models, str | Path) else list(models)
    names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
    return evaluate_models(given, TaskOptions(names, limit, fewshot, chat, device))


def code_digest(
    *,
    dataset: Dataset | None = None,
    loss: Loss | None = None,
    validation: Dataset | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: Callable[[int, int], float] | None = None,
) -> str:
    """Return the value of `run.code` for these functions.

    The value is the SHA-256, in hex, over the source of the modules that define the functions.
    Modules that these modules import, and values that closures hold, are not part of it.

    Raises `ConfigError` for a function without a source file.
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


def _with_function(config: RunConfig, evaluation: Score | None) -> RunConfig:
    """Return a copy of `config` with a function for evaluations as one more task."""
    from dilocox.training.tasks.own_function import as_task, check_not_importing

    check_not_importing()
    if evaluation is None:
        return config
    task = as_task(evaluation)
    tasks = [*(each for each in config.evaluation.tasks if each != task), task]
    own = config.evaluation.model_copy(update={"tasks": tasks})
    return config.model_copy(update={"evaluation": own})


def _with_permission(config: RunConfig, replaced: bool, resume: bool) -> RunConfig:
    """Return a copy of `config` in which every site has the right value of `own_code`.

    `own_code` permits a site to run code that is not dilocox's own. Every site gets it if a part
    of the inner step is `replaced`. A resumed run keeps the permissions that it was started with.
    """
    from dilocox.training.launch.run_folder import check_reachable

    permitted = {name for name, own in config.sites.items() if own.own_code}
    if resume:
        check_reachable(config.folder)
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
