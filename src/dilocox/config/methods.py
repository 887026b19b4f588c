"""The methods of docs/algorithm.md §5, as sets of defaults.

A method is one row: defaults for `[outer]`, `[compression]` and `[control]`, and whether gradients
or pseudo-gradients are exchanged. A run file may set every one of these keys itself. Other packages
add rows with `register_method` or an entry point of the group `dilocox.methods`
(docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.config.extensions import Registry

GROUP = "dilocox.methods"


@dataclass(frozen=True)
class Method:
    """One method: the defaults that `outer.method` selects."""

    name: str
    """Value of `outer.method`."""
    outer: Mapping[str, Any]
    """Keys of `[outer]`: `inner_steps`, `overlap`, `learning_rate` and `momentum` at least."""
    compression: Mapping[str, Any]
    """Keys of `[compression]`: `codec` and `error_feedback` at least."""
    control: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `[control]`: `adapt` if plans adapt, else none."""
    exchanges_gradients: bool = False
    """Whether sites average the gradients of every inner step instead of pseudo-gradients."""


BUILT_IN = (
    # Synchronous data parallel: dense gradients are exchanged in every step. A round is only the
    # interval of accounting; the outer learning rate and momentum are not used.
    Method(
        "allreduce",
        outer={"inner_steps": 10, "overlap": "none", "learning_rate": 1.0, "momentum": 0.0},
        compression={"codec": "none", "error_feedback": False},
        exchanges_gradients=True,
    ),
    # ICML 2023. Compressed gradients, used one inner step late, so that the exchange overlaps
    # with the computation of the next step.
    Method(
        "cocktailsgd",
        outer={
            "inner_steps": 10,
            "overlap": "none",
            "delay": 1,
            "learning_rate": 1.0,
            "momentum": 0.0,
            "exchange": "reduce",
        },
        compression={"codec": "cocktail", "error_feedback": True},
        exchanges_gradients=True,
    ),
    # arXiv 2311.08105
    Method(
        "diloco",
        outer={"inner_steps": 500, "overlap": "none", "learning_rate": 0.7, "momentum": 0.9},
        compression={"codec": "none", "error_feedback": False},
    ),
    # arXiv 2407.07852
    Method(
        "opendiloco",
        outer={"inner_steps": 500, "overlap": "none", "learning_rate": 0.7, "momentum": 0.9},
        compression={"codec": "fp16", "error_feedback": False},
    ),
    # arXiv 2412.01152
    Method(
        "intellect1",
        outer={"inner_steps": 100, "overlap": "none", "learning_rate": 0.7, "momentum": 0.9},
        compression={"codec": "int8", "error_feedback": False},
    ),
    # arXiv 2508.15706
    Method(
        "sparseloco",
        outer={"inner_steps": 30, "overlap": "none", "learning_rate": 1.0, "momentum": 0.0},
        compression={"codec": "topk:64", "error_feedback": True, "residual_decay": 0.95},
    ),
    # arXiv 2506.21263. Rank 64 is a quarter of a hidden size of 256, as the paper's rank of 2,048
    # is a quarter of 8,192. Users should set the rank for their own model.
    Method(
        "dilocox-paper",
        outer={"inner_steps": 125, "overlap": "naive", "learning_rate": 0.7, "momentum": 0.9},
        compression={"codec": "lowrank:64", "error_feedback": True},
        control={"adapt": "effective-rank"},
    ),
    # Staggered fragments and the smallest delay that hides the exchange. The controller chooses
    # the least lossy codec and number of inner steps that the link allows. These are the values
    # of the first rounds.
    Method(
        "dilocox",
        outer={
            "inner_steps": 20,
            "overlap": "keep",
            "fragments": 4,
            "learning_rate": 0.8,
            "momentum": 0.5,
        },
        compression={"codec": "int4", "error_feedback": True, "moments": True},
        control={"adapt": "link"},
    ),
)
"""The methods that come with dilocox."""
DEFAULT_ROUNDS = 10
"""`outer.rounds` of a run file that sets neither `rounds` nor `steps`."""

BEFORE: dict[str, dict[str, Any]] = {"compression": {"moments": False}}
"""Keys that methods set and earlier versions did not know, with the behaviour of those versions as
their values. These keys complete the `run.toml` of an earlier version."""
_OUTER = ("inner_steps", "overlap", "learning_rate", "momentum")
_OF_RUNS = ("method", "rounds", "steps")


def register_method(method: Method) -> None:
    """Register a method in this process and in the processes that it forks.

    Call the function before the run file is resolved. A fresh process needs an entry point of the
    group `dilocox.methods` instead (docs/extending.md). Registering an equal method again changes
    nothing.

    Args:
        method: The method's row.

    Raises:
        ConfigError: The name is taken or malformed, or a required default is missing.
    """
    _METHODS.add(method)


def find_method(name: object) -> Method | None:
    """Returns the method of that name, or None. Raises `ConfigError` for a broken entry point."""
    return _METHODS.find(name) if isinstance(name, str) else None


def exchanges_gradients(name: object) -> bool:
    """Returns whether the method of that name exchanges gradients; False if it is unknown."""
    found = find_method(name)
    return found is not None and found.exchanges_gradients


def known_methods() -> list[str]:
    """Returns the names of all methods for messages, entry points included."""
    return [*METHODS, *_METHODS.not_loaded()]


def method_defaults(
    method: str, given: dict[str, Any], compression: dict[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the defaults of `method` by section: `outer`, `compression` and `control`.

    Some defaults depend on keys that the run file sets:

    - Slots: one per inner step with several fragments or with overlap `keep`, else one per round.
    - Delay: 0 for overlap `none`, the whole round for `naive` and `eager`. For `keep`, it is the
      number of slots between the boundaries of two fragments.
    - `control.adapt` is `off` if the run file sets an overlap rule or codec with which the method
      cannot adapt its plans.

    Args:
        method: a key of `METHODS`.
        given: `[outer]` of the run file, as written.
        compression: `[compression]` of the run file, as written; None if there is none.
    """
    chosen = METHODS[method]
    outer = dict(chosen.outer)
    defaults = {"outer": outer, "compression": dict(chosen.compression)}
    if "steps" not in given:
        outer["rounds"] = DEFAULT_ROUNDS
    merged = {**outer, **given}
    steps = merged.get("inner_steps", 1)
    fragments = merged.get("fragments", 1)
    overlap = merged["overlap"]
    codec = {**chosen.compression, **(compression or {})}.get("codec")
    adapt = chosen.control.get("adapt", "off")
    fits = {"link": overlap == "keep", "effective-rank": str(codec).startswith("lowrank")}
    defaults["control"] = {"adapt": adapt if fits.get(adapt) else "off"}
    if not (isinstance(steps, int) and isinstance(fragments, int) and isinstance(overlap, str)):
        return defaults  # the validation reports the wrong type
    outer.setdefault("fragments", 1)
    outer["slots"] = steps if fragments > 1 or overlap == "keep" else 1
    slots = merged.get("slots", outer["slots"])
    if isinstance(slots, int):
        if fragments > slots and "fragments" not in given:
            fragments = outer["fragments"] = max(slots, 1)
        delay = {"none": 0, "naive": slots, "eager": slots}.get(
            overlap, max(1, slots // max(fragments, 1))
        )
        outer.setdefault("delay", delay)
    return defaults


def _problem(method: Method) -> str | None:
    """Returns the reason against a method that is not built in, or None."""
    for section, keys, due in (
        ("outer", method.outer, _OUTER),
        ("compression", method.compression, ("codec", "error_feedback")),
    ):
        lacking = [key for key in due if key not in keys]
        if lacking:
            return f"its {section} lacks {', '.join(lacking)}; give a default for each"
    own = [key for key in _OF_RUNS if key in method.outer]
    if own:
        return f"its outer has {', '.join(own)}, which only a run file sets; leave it out"
    return None


_METHODS = Registry(GROUP, Method, BUILT_IN, _problem)
METHODS = _METHODS.records
"""The methods that this process knows, by name."""
