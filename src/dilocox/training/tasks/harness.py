"""Evaluates a Hugging Face folder on tasks by lm-eval, in this process.

lm-eval is EleutherAI's Language Model Evaluation Harness. A task is a name that lm-eval knows, or
the path of a task file in YAML, or of a folder with such files. A function of the user's own
(`own_function`) is a task, too, and needs no lm-eval. Functions of this module import lm-eval and
its dependencies only when they are called, because the imports take seconds.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dilocox.errors import CheckpointError, ConfigError, EvaluationError
from dilocox.training.device_check import check_device
from dilocox.training.run_model import model_folder
from dilocox.training.tasks.agreed_file import run_agreed
from dilocox.training.tasks.own_function import (
    Score,
    evaluate_functions,
    is_function,
    load_function,
    name_of,
)
from dilocox.utils.adapter_files import is_adapter_folder
from dilocox.utils.formatting import reason_of

BATCH = 8
"""Sequences per batch on a CPU. On a GPU lm-eval finds the largest batch that fits."""
CLOSE = 3
"""Most similar names in the message about an unknown task."""
INSTALL = "pip install 'dilocox[eval]'"


@dataclass(frozen=True)
class TaskOptions:
    """The tasks, and how they are evaluated."""

    tasks: tuple[str, ...]
    """Names, paths of task files or of folders with task files, or functions."""
    limit: int = 0
    """Most examples of each task; 0: all."""
    fewshot: int | None = None
    """Examples in the prompt. None: as the task says. Only for tasks of lm-eval, as are `limit` and
    `chat`."""
    chat: bool = False
    """Whether prompts are written with the tokenizer's chat template."""
    device: str = "cpu"
    """PyTorch's name of a device."""
    agreed: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the files of functions on which the sites agreed, by task. Other bytes are not
    run."""


def check_installed(asked: str = "evaluation.tasks") -> None:
    """Raise `ConfigError` if lm-eval is not installed. `asked`: the key or option that needs it."""
    for name in ("lm_eval", "datasets", "accelerate", "peft"):
        if importlib.util.find_spec(name) is None:
            package = {"lm_eval": "lm-eval"}.get(name, name)
            raise ConfigError(f"{asked}: {package} is not installed; run: {INSTALL}")


def check_tasks(options: TaskOptions, asked: str = "evaluation.tasks") -> list[str]:
    """Load all tasks with their data, and return the names of the tasks.

    `asked`: the key or option that names the tasks, for messages. Raises `ConfigError` for an
    unknown task, a task whose data cannot be loaded, and a task that runs code of the model.
    """
    found: dict[str, str] = {}
    functions, tasks = split_tasks(options.tasks)
    for function in functions:
        _function(function, options, asked)
        if name_of(function) in found:
            raise ConfigError(
                f"{asked}: {found[name_of(function)]} and {function} have the same name: rename one"
            )
        found[name_of(function)] = function
    if functions and not tasks:
        return list(found)
    check_installed(asked)
    _quiet()
    manager, specs = _find(tasks, asked)
    for given, spec in specs:
        try:
            loaded = manager.load([spec])["tasks"]
        except Exception as error:  # task files and data come from anywhere: any error may come
            raise ConfigError(
                f"{asked}: {given} cannot be loaded ({reason_of(error)}); is its data there, or "
                "its hub reachable from this machine?"
            ) from None
        for name, task in loaded.items():
            if name in found:
                raise ConfigError(
                    f"{asked}: task {name} is in {found[name]} and in {given}: name it once"
                )
            if getattr(task, "UNSAFE_CODE", False):
                raise ConfigError(
                    f"{asked}: {name} runs code that the model writes, which dilocox does not do: "
                    "leave the task out, and run it with lm-eval itself in a sandbox"
                )
            found[name] = given
    return list(found)


def split_tasks(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the functions among `tasks`, and the tasks of lm-eval."""
    functions = [task for task in tasks if is_function(task)]
    return functions, [task for task in tasks if not is_function(task)]


def evaluate_folder(
    folder: Path, options: TaskOptions, asked: str = "evaluation.tasks"
) -> dict[str, Any]:
    """Evaluate the model in a Hugging Face folder, and return results in the form of lm-eval.

    Raises `ConfigError` for unknown tasks or a device that is not there, `CheckpointError` if the
    model cannot be loaded, and `EvaluationError` if the evaluation fails.
    """
    functions, tasks = split_tasks(options.tasks)
    results: dict[str, Any] = {"results": {}}
    if tasks or not functions:
        results = _by_lm_eval(folder, replace(options, tasks=tuple(tasks)), asked)
    if functions:
        check_device(options.device, asked)
        loaded = {task: _function(task, options, asked) for task in functions}
        results["results"] |= evaluate_functions(loaded, folder, options.device)
    return results


def _function(task: str, options: TaskOptions, asked: str) -> Score:
    """Return the function of a task. Raises `ConfigError`, also for a file that was changed."""
    digest = options.agreed.get(task)
    if digest is None:
        return load_function(task, asked)
    found: Score = vars(run_agreed(task.rpartition(":")[0], digest, asked))[task.rpartition(":")[2]]
    return found


def _by_lm_eval(folder: Path, options: TaskOptions, asked: str) -> dict[str, Any]:
    """Return the results of lm-eval for the model in a folder.

    lm-eval writes its progress to the standard error. Code in the folder is not run. Raises the
    errors of `evaluate_folder`.
    """
    check_installed(asked)
    _quiet()
    manager, specs = _find(options.tasks, asked)
    model = _load(folder, options, asked)
    from lm_eval import simple_evaluate

    try:
        results = simple_evaluate(
            model,
            tasks=[spec for _, spec in specs],
            task_manager=manager,
            limit=options.limit or None,
            num_fewshot=options.fewshot,
            apply_chat_template=options.chat,
            log_samples=False,
        )
    except Exception as error:  # tasks, metrics and models come from anywhere
        raise EvaluationError(f"{folder}: lm-eval failed ({reason_of(error)})") from error
    if not results or not results.get("results"):
        raise EvaluationError(f"{folder}: lm-eval found no results")
    return dict(results)


def evaluate_models(
    models: Sequence[str | Path], options: TaskOptions, asked: str = "tasks"
) -> dict[str, dict[str, Any]]:
    """Evaluate several models, and return the results of lm-eval by the given text of the model.

    `models`: run folders or Hugging Face folders. Raises the errors of `evaluate_folder`, and those
    of `check_tasks` before a model is loaded.
    """
    folders = {str(model): model_folder(model) for model in models}
    if options.limit < 0 or (options.fewshot or 0) < 0:
        raise ConfigError(f"{asked}: limit and fewshot cannot be negative")
    check_tasks(options, asked)
    return {name: evaluate_folder(folder, options, asked) for name, folder in folders.items()}


def _load(folder: Path, options: TaskOptions, asked: str) -> Any:
    """Return the model in `folder` as lm-eval's `HFLM`."""
    from lm_eval.models.huggingface import HFLM

    from dilocox.models.network import attention_of

    check_device(options.device, asked)
    try:
        network, options_of_adapters = _base(folder)
        model = HFLM(
            pretrained=network,
            device=options.device,
            batch_size=BATCH if options.device == "cpu" else "auto",
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation=attention_of(network, options_of_adapters.get("revision")),
            **options_of_adapters,
        )
        if options.chat and not getattr(model.tokenizer, "chat_template", None):
            raise ConfigError(f"{asked}: {folder} has no chat template; evaluate it without one")
    except ConfigError:
        raise
    except Exception as error:  # missing or damaged files: many kinds
        raise CheckpointError(f"{folder}: cannot be loaded ({reason_of(error)})") from None
    return model


def _base(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the folder or hub name of the network, and lm-eval's options for its adapters."""
    from dilocox.models.adapter_folder import AdapterFolder

    if not is_adapter_folder(folder):
        return str(folder), {}
    base, revision = AdapterFolder.of(folder).base
    return base, {
        "peft": str(folder),
        "tokenizer": str(folder),
        **({"revision": revision} if revision else {}),
    }


def _find(tasks: Sequence[str], asked: str) -> tuple[Any, list[tuple[str, str]]]:
    """Return lm-eval's task manager, and pairs of (text that was given, lm-eval's name or path).

    Raises `ConfigError` for an unknown task.
    """
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise ConfigError(f"{asked}: names no task")
    paths = {text: Path(text).expanduser() for text in tasks if _is_path(text)}
    for text, path in paths.items():
        if not path.exists():
            raise ConfigError(f"{asked}: {text}: no such file or folder")
    folders = list(dict.fromkeys(p if p.is_dir() else p.parent for p in paths.values()))
    # lm-eval's own tasks are 14,000 files, which take seconds to read.
    named = len(paths) < len(set(tasks))
    manager = TaskManager(include_path=[str(f) for f in folders], include_defaults=named)
    found = []
    for text in tasks:
        if text in paths:
            found += [(text, spec) for spec in _in_path(paths[text], text, asked)]
            continue
        names = manager.match_tasks([text])
        if not names:
            close = difflib.get_close_matches(text, manager.all_tasks, CLOSE)
            mend = f"did you mean {', '.join(close)}?" if close else "`lm-eval ls tasks` lists them"
            raise ConfigError(f"{asked}: lm-eval knows no task {text!r}; {mend}")
        found += [(text, name) for name in names]
    return manager, found


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith((".yaml", ".yml")) or text.startswith("~")


def _in_path(path: Path, text: str, asked: str) -> list[str]:
    """Return lm-eval's name or path of each task in a file or a folder."""
    from lm_eval.tasks import TaskManager

    if path.is_file():
        return [str(path)]
    there = TaskManager(include_path=str(path), include_defaults=False)
    if not there.all_tasks:
        raise ConfigError(f"{asked}: {text}: holds no task files (*.yaml with a key `task`)")
    return list(there.all_subtasks)


def _quiet() -> None:
    """Keep lm-eval's and datasets' notes out of the output; their errors are raised."""
    import datasets

    datasets.disable_progress_bars()
    for name in ("lm_eval", "lm-eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
