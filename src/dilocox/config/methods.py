"""The methods of docs/algorithm.md §5: each one a composition of the same parts.

A method is nothing but defaults for `[outer]`, `[compression]` and `[control]`; a run file may set
every one of these keys itself.
"""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, dict[str, Any]]] = {
    # Plain synchronous data parallel: gradients, dense, every step. Its round is only the
    # interval of accounting; outer lr and momentum are not used.
    "allreduce": {
        "outer": {"inner_steps": 10, "overlap": "none", "learning_rate": 1.0, "momentum": 0.0},
        "compression": {"codec": "none", "error_feedback": False},
    },
    # ICML 2023. Gradients as well, but compressed, and used one inner step late, so that they
    # travel beside the next step's computation.
    "cocktailsgd": {
        "outer": {
            "inner_steps": 10,
            "overlap": "none",
            "delay": 1,
            "learning_rate": 1.0,
            "momentum": 0.0,
            "exchange": "reduce",
        },
        "compression": {"codec": "cocktail", "error_feedback": True},
    },
    # arXiv 2311.08105
    "diloco": {
        "outer": {"inner_steps": 500, "overlap": "none", "learning_rate": 0.7, "momentum": 0.9},
        "compression": {"codec": "none", "error_feedback": False},
    },
    # arXiv 2407.07852
    "opendiloco": {
        "outer": {"inner_steps": 500, "overlap": "none", "learning_rate": 0.7, "momentum": 0.9},
        "compression": {"codec": "fp16", "error_feedback": False},
    },
    # arXiv 2412.01152
    "intellect1": {
        "outer": {"inner_steps": 100, "overlap": "none", "learning_rate": 0.7, "momentum": 0.9},
        "compression": {"codec": "int8", "error_feedback": False},
    },
    # arXiv 2508.15706
    "sparseloco": {
        "outer": {"inner_steps": 30, "overlap": "none", "learning_rate": 1.0, "momentum": 0.0},
        "compression": {"codec": "topk:64", "error_feedback": True, "residual_decay": 0.95},
    },
    # arXiv 2506.21263. Rank 64 is a quarter of a hidden size of 256, as the paper's 2,048 is of
    # 8,192: to be set to the model at hand.
    "dilocox-paper": {
        "outer": {"inner_steps": 125, "overlap": "naive", "learning_rate": 0.7, "momentum": 0.9},
        "compression": {"codec": "lowrank:64", "error_feedback": True},
        "control": {"adapt": "effective-rank"},
    },
    # Staggered fragments, the smallest delay that hides the exchange, and of the codecs and
    # numbers of inner steps that the link allows the least lossy. It begins with these.
    "dilocox": {
        "outer": {
            "inner_steps": 20,
            "overlap": "keep",
            "fragments": 4,
            "learning_rate": 0.8,
            "momentum": 0.5,
        },
        "compression": {"codec": "int4", "error_feedback": True, "moments": True},
        "control": {"adapt": "link"},
    },
}
EXCHANGE_GRADIENTS = ("allreduce", "cocktailsgd")
"""Methods that exchange the gradients of every inner step instead of pseudo-gradients."""
DEFAULT_ROUNDS = 10

BEFORE: dict[str, dict[str, Any]] = {"compression": {"moments": False}}
"""Keys that methods set and older versions did not know, as those behaved."""


def method_defaults(
    method: str, given: dict[str, Any], compression: dict[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Defaults of `method` where the run file's `[outer]` and `[compression]` fix some keys.

    Slots, fragments and delay follow from what is given: one slot per inner step with fragments,
    one slot per round without; the delay is the whole round for `naive` and `eager`, none for
    `none`, and the time between two fragments' boundaries for `keep`. A method that adapts its
    plans does so only where the run file leaves it the overlap rule or codec that this needs.
    """
    chosen = METHODS[method]
    outer = dict(chosen["outer"])
    defaults = {"outer": outer, "compression": dict(chosen["compression"])}
    if "steps" not in given:
        outer["rounds"] = DEFAULT_ROUNDS
    merged = {**outer, **given}
    steps = merged.get("inner_steps", 1)
    fragments = merged.get("fragments", 1)
    overlap = merged["overlap"]
    codec = {**chosen["compression"], **(compression or {})}.get("codec")
    adapt = chosen.get("control", {}).get("adapt", "off")
    fits = {"link": overlap == "keep", "effective-rank": str(codec).startswith("lowrank")}
    defaults["control"] = {"adapt": adapt if fits.get(adapt) else "off"}
    if not (isinstance(steps, int) and isinstance(fragments, int) and isinstance(overlap, str)):
        return defaults  # of a wrong type: the validation says so
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
