"""The methods of ALGORITHM.md §5: each one a composition of the same parts.

A method is nothing but defaults for `[outer]` and `[compression]`; a run file may set every one
of these keys itself.
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
    # Staggered fragments, the smallest delay that hides the exchange, int4 with error feedback.
    "dilocox": {
        "outer": {
            "inner_steps": 20,
            "overlap": "keep",
            "fragments": 4,
            "learning_rate": 0.8,
            "momentum": 0.5,
        },
        "compression": {"codec": "int4", "error_feedback": True},
    },
}


def method_defaults(method: str, given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Defaults of `method` where `given`, the run file's `[outer]`, already fixes some keys.

    Slots, fragments and delay follow from what is given: one slot per inner step with fragments,
    one slot per round without; the delay is the whole round for `naive` and `eager`, none for
    `none`, and the time between two fragments' boundaries for `keep`.
    """
    chosen = METHODS[method]
    outer = dict(chosen["outer"])
    merged = {**outer, **given}
    steps = merged.get("inner_steps", 1)
    fragments = merged.get("fragments", 1)
    overlap = merged["overlap"]
    if not (isinstance(steps, int) and isinstance(fragments, int) and isinstance(overlap, str)):
        # Of a wrong type: the validation says so.
        return {"outer": outer, "compression": dict(chosen["compression"])}
    outer.setdefault("fragments", 1)
    outer["slots"] = steps if fragments > 1 or overlap == "keep" else 1
    slots = merged.get("slots", outer["slots"])
    if isinstance(slots, int):
        if fragments > slots and "fragments" not in given:
            fragments = outer["fragments"] = max(slots, 1)
        outer["delay"] = {"none": 0, "naive": slots, "eager": slots}.get(
            overlap, max(1, slots // max(fragments, 1))
        )
    return {"outer": outer, "compression": dict(chosen["compression"])}
