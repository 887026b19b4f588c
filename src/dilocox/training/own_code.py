"""Functions of a user's own in a run: their code's digest, and what an evaluation asks for.

All sites of a run must run the same functions. The digest over their source stands in the run file
(`run.code`), which all sites agree on when they join.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dilocox.errors import ConfigError

ZERO = (
    "the held-out loss is exactly 0: the loss leaves out every label of the held-out text, or the "
    "model is broken; give validation= sequences of the form that the loss is for"
)


def code_digest(functions: Mapping[str, Callable[..., Any] | None]) -> str:
    """SHA-256, hex, over what each function is for, its name, and the source of its module.

    The same at every site that has the same files, whatever their places. Modules that these
    import, and values that a closure holds, are not part of it. Empty without functions. Raises
    `ConfigError` for a function without a source file, such as one that was typed in.
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
    """What has the name and the module of a callable."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)


def check_code(
    agreed: str, functions: Mapping[str, Callable[..., Any] | None], *, required: bool
) -> None:
    """Raise `ConfigError` unless the functions are those of the run file's `run.code`.

    `required`: a run file without it takes none, since other sites could run others.
    """
    names = ", ".join(use for use, function in sorted(functions.items()) if function is not None)
    if not agreed and not (required and names):
        return
    digest = code_digest(functions)
    if digest == agreed:
        return
    if not digest:
        raise ConfigError(
            f"run.code {agreed[:12]}…: this run trains by functions of its own; start it from "
            "Python with these (dilocox.train, dilocox.join), or leave run.code out"
        )
    if not agreed:
        raise ConfigError(
            f"run.code: not set, and this site brings {names}; set it in the run file of the "
            f'coordinator and of all sites, so that they run the same: code = "{digest}" in [run]'
        )
    raise ConfigError(
        f"run.code: the run file has {agreed[:12]}…, the code of {names} here is {digest[:12]}…; "
        "copy the same modules to every site, or set run.code everywhere to " + digest
    )


class Reporter(Protocol):
    """What of a `CoordinatorClient` is needed here."""

    def report(self, round_: int, metrics: Mapping[str, Any], kind: Any = "round") -> None:
        """Metrics of this site's round."""


def evaluated(
    client: Reporter,
    on_evaluation: Callable[[int, float], object] | None,
    round_: int,
    loss: float,
) -> None:
    """Tell the user's callback a held-out loss and report it; with it, whether the callback returns
    True: then the run ends early.
    """
    kind = "evaluation" if round_ >= 0 else "first_evaluation"
    metrics: dict[str, Any] = {"val_loss": loss, "after_round": round_}
    if on_evaluation is not None and on_evaluation(round_, loss) is True:
        metrics["ends"] = True
    client.report(max(round_, 0), metrics, kind=kind)
    if loss == 0.0:
        client.report(max(round_, 0), {"text": ZERO}, kind="warning")
