"""A Python function of the user's own as a task: it gets a model and a tokenizer, and scores them.

The function is named by its file, `FILE.py:FUNCTION`, since the process that evaluates imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dilocox.errors import ConfigError, EvaluationError
from dilocox.utils.formatting import reason_of

Score = Callable[[Any, Any], Mapping[str, float]]
"""(model of transformers or PEFT, tokenizer) -> figures by name."""
_NAMED = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
_importing = False


def is_function(task: str) -> bool:
    """Return whether a task is written as a function: `FILE.py:FUNCTION`."""
    return _NAMED.fullmatch(task) is not None


def name_of(task: str) -> str:
    """Return the name of the function in `FILE.py:FUNCTION`, which is the task's name."""
    return task.rpartition(":")[2]


def as_task(function: Score, asked: str = "evaluation") -> str:
    """Return `FILE.py:FUNCTION` for a function.

    Raises `ConfigError` if another process cannot find the function by file and name.
    """
    name = getattr(function, "__qualname__", "")
    try:
        path = Path(inspect.getsourcefile(function) or "").resolve()
    except TypeError:
        path = Path()
    if not name.isidentifier() or not is_function(f"{path}:{name}"):
        shown = name or type(function).__name__
        raise ConfigError(
            f"{asked}: {shown} cannot be found by another process; define a function "
            "at the top level of a .py file"
        )
    return f"{path}:{name}"


def check_not_importing() -> None:
    """Raise `ConfigError` if this process imports the file of a function just now."""
    if _importing:
        raise ConfigError(
            "the file of the user's own functions starts a run when it is imported; put the start "
            'below `if __name__ == "__main__":`'
        )


def load_function(task: str, asked: str = "evaluation.tasks") -> Score:
    """Import the function `FILE.py:FUNCTION`.

    A file in a package is imported as a module of the package. The folder of the file, or of the
    package, is put at the end of Python's path. Raises `ConfigError` if there is no such function.
    """
    found = _NAMED.fullmatch(task)
    assert found is not None
    file, name = Path(found[1]).expanduser().resolve(), found[2]
    if not file.is_file():
        raise ConfigError(f"{asked}: {task}: no such file")
    try:
        with importing():
            module = _imported(file)
    except ConfigError:
        raise
    except BaseException as error:  # code of the user's may raise anything, SystemExit too
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(f"{asked}: {file} cannot be imported ({reason_of(error)})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{asked}: {file} has no function {name}")
    return function  # type: ignore[no-any-return]


def evaluate_functions(
    functions: Mapping[str, Score], folder: Path, device: str
) -> dict[str, dict[str, float]]:
    """Call the functions with the model in `folder`, and return rows like those of lm-eval.

    The model is in evaluation mode on `device`. On the CPU it has the data type of its files, else
    bf16. Random numbers begin from seed 0. `functions`: by task. Raises `CheckpointError` if the
    model cannot be loaded, and `EvaluationError` if a function fails or returns something else than
    figures by name.
    """
    import torch

    from dilocox.training.run_model import load_model

    tokenizer, model = load_model(folder, device)
    model.to(device)
    rows = {}
    for task, function in functions.items():
        random.seed(0)
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                said = function(model, tokenizer)
        except Exception as error:  # code of the user's may raise anything
            raise EvaluationError(f"{task} failed ({reason_of(error)})") from error
        rows[name_of(task)] = {
            f"{name},none": value for name, value in _figures(task, said).items()
        }
    return rows


def _figures(task: str, said: object) -> dict[str, float]:
    """Return what a function has returned as numbers by name. Raises `EvaluationError`."""
    if not isinstance(said, Mapping) or not said:
        raise EvaluationError(
            f"{task} returned {type(said).__name__}; return figures by name, such as "
            '{"accuracy": 0.5}'
        )
    found = {}
    for name, value in said.items():
        if not isinstance(name, str) or not name or "," in name:
            raise EvaluationError(f"{task} named a figure {name!r}; use a text without a comma")
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            raise EvaluationError(
                f"{task} returned {type(value).__name__} for {name!r}; return a number"
            ) from None
    return {name: value if math.isfinite(value) else math.nan for name, value in found.items()}


@contextmanager
def importing() -> Iterator[None]:
    """Within this context, `check_not_importing` raises its error."""
    global _importing
    before, _importing = _importing, True
    try:
        yield
    finally:
        _importing = before


def _imported(file: Path) -> Any:
    root, names = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        # At the end: a file such as evaluate.py must not hide a package of that name.
        sys.path.append(str(root))
    if len(names) > 1:
        return importlib.import_module(".".join(names))
    spec = importlib.util.spec_from_file_location(f"dilocox_task_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
