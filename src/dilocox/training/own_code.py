"""A user's own functions in a run: the digest of their code, and the call after an evaluation.

All sites of a run must run the same functions. So the run file, on which all sites agree when they
join, holds the digest of their source (`run.code`).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dilocox.coordinator.protocol.held_out_figures import BY_SOURCE
from dilocox.errors import ConfigError
from dilocox.inner.columns import takes_columns

ZERO = (
    "the held-out loss is exactly 0: the loss leaves out every label of the held-out text, or the "
    "model is broken; give validation= sequences of the form that the loss is for"
)


def code_digest(functions: Mapping[str, Callable[..., Any] | None]) -> str:
    """Return the SHA-256, hex, over use, name and module source of each function.

    `functions` maps the use of each function, such as "loss", to the function. The digest is the
    same at every site with the same files, whatever their paths. Modules that the source imports,
    and values that a closure holds, are not part of it. The digest is empty without functions.

    Raises `ConfigError` for a function without a source file, such as a function that was typed
    at a prompt.
    """
    found = []
    for use, function in sorted(functions.items()):
        if function is None:
            continue
        named = _named(function)
        try:
            path = inspect.getsourcefile(sys.modules[named.__module__])
            source = Path(str(path)).read_bytes().replace(b"\r\n", b"\n")
        except (KeyError, TypeError, OSError, AttributeError):
            raise ConfigError(
                f"{use}: its code has no source file; define it at the top level of a module"
            ) from None
        name = getattr(named, "__qualname__", type(named).__qualname__)
        found.append(f"{use} {name} {hashlib.sha256(source).hexdigest()}")
    if not found:
        return ""
    return hashlib.sha256("\n".join(["dilocox: code", *found]).encode()).hexdigest()


def _named(function: Any) -> Any:
    """Return the object that has name and module of a callable: a function or a class."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)


def check_code(
    agreed: str, functions: Mapping[str, Callable[..., Any] | None], *, required: bool
) -> None:
    """Check that the functions are the ones on which all sites have agreed.

    `agreed`: the run file's `run.code`. `required`: whether a run file without `run.code` permits
    no functions, because other sites could run other functions. Raises `ConfigError` if the
    functions differ.
    """
    names = ", ".join(use for use, function in sorted(functions.items()) if function is not None)
    if not agreed and not (required and names):
        return
    digest = code_digest(functions)
    if digest == agreed:
        return
    if not digest:
        raise ConfigError(
            f"run.code {agreed[:12]}…: this run trains with the user's own functions; name their "
            "file as site.code, or start it from Python with these functions (dilocox.train, "
            "dilocox.join), or leave run.code out"
        )
    if not agreed:
        raise ConfigError(
            f"run.code: not set, and this site uses its own {names}; set it in the run file of "
            "the coordinator and of all sites, so that they run the same functions: "
            f'code = "{digest}" in [run]'
        )
    raise ConfigError(
        f"run.code: the run file has {agreed[:12]}…, the code of {names} here is {digest[:12]}…; "
        "copy the same modules to every site, or set run.code everywhere to " + digest
    )


PARAMETERS = {
    "dataset": ("start", "count"),
    "evaluation": ("model", "tokenizer"),
    "loss": ("logits", "labels"),
    "on_evaluation": ("round_", "loss"),
    "optimizer": ("parameters",),
    "schedule": ("step", "steps"),
    "validation": ("start", "count"),
}
"""Positional arguments of every function that a user may bring, by its use."""


def check_signatures(functions: Mapping[str, Callable[..., Any]], where: str = "") -> None:
    """Raise `ConfigError` if a function cannot be called with the arguments of its use.

    `functions`: by their use, such as "loss". `where`: begins the message.
    """
    for use, function in functions.items():
        words = PARAMETERS[use]
        columns = use == "loss" and takes_columns(function)
        try:
            signature = inspect.signature(function)
        except ValueError:  # a builtin without a signature
            continue
        try:
            signature.bind(*words, **({"columns": {}} if columns else {}))
        except TypeError as error:
            raise ConfigError(
                f"{where}{use}{signature}: cannot be called with its arguments ({error}); define "
                f"{use}({', '.join(words)})"
            ) from None


def check_columns(
    columns: Sequence[str], functions: Mapping[str, Callable[..., Any] | None]
) -> None:
    """Check that a loss reads the columns of the data, and that the data have columns to read.

    `columns`: `data.columns`. Raises `ConfigError` otherwise.
    """
    loss = functions.get("loss")
    takes = loss is not None and takes_columns(loss)
    if columns and not takes:
        raise ConfigError(
            f"data.columns {', '.join(columns)}: no loss reads them; give dilocox.train or "
            "dilocox.join a loss with a parameter named columns, or leave data.columns out"
        )
    if takes and not columns:
        raise ConfigError(
            "loss: has a parameter named columns, and data.columns names none; name fields of the "
            "records there, or give the parameter another name"
        )
    own = [name for name in ("dataset", "validation") if functions.get(name) is not None]
    if takes and own:
        raise ConfigError(
            f"{own[0]}: gives tokens alone, and the loss reads columns; leave {own[0]} out, or the "
            "loss's parameter columns"
        )


def check_preference(format_: str, functions: Mapping[str, Callable[..., Any] | None]) -> None:
    """Check that preference training uses its own loss and data. Raises `ConfigError` otherwise.

    `format_`: `data.format`.
    """
    own = [name for name in ("loss", "dataset", "validation") if functions.get(name) is not None]
    if format_ == "preference" and own:
        raise ConfigError(
            f'{own[0]}: data.format "preference" has a loss for its pairs; leave {own[0]} out, or '
            "use another format"
        )


class Reporter(Protocol):
    """The part of a `CoordinatorClient` that this module needs."""

    def report(self, round_: int, metrics: Mapping[str, Any], kind: Any = "round") -> object:
        """Report metrics of this site's round."""


def evaluated(
    client: Reporter,
    on_evaluation: Callable[[int, float], object] | None,
    round_: int,
    loss: float,
    by_source: Mapping[str, float] | None = None,
    figures: Mapping[str, float] | None = None,
) -> None:
    """Call the user's callback with a held-out loss, and report the loss to the coordinator.

    If the callback returns True, the report asks the coordinator to end the run early. A loss of
    exactly 0 is also reported as a warning. `round_` -1 means before training. `by_source`: the
    loss of each of several sources. `figures`: further figures of held-out text, by field.
    """
    kind = "evaluation" if round_ >= 0 else "first_evaluation"
    metrics: dict[str, Any] = {"val_loss": loss, "after_round": round_, **(figures or {})}
    if by_source:
        metrics[BY_SOURCE] = dict(by_source)
    if on_evaluation is not None and on_evaluation(round_, loss) is True:
        metrics["ends"] = True
    client.report(max(round_, 0), metrics, kind=kind)
    if loss == 0.0:
        client.report(max(round_, 0), {"text": ZERO}, kind="warning")
