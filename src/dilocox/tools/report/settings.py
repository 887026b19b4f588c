"""The settings of a run, as its run file states them and as its rounds used them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dilocox.tools.report.folder import RunFiles

REALISED = (
    ("outer", "inner_steps"), ("outer", "fragments"), ("outer", "delay"),
    ("outer", "learning_rate"), ("outer", "momentum"), ("compression", "codec"),
)  # fmt: skip
"""Keys for which the controller may choose other values than the run file's."""


def realised(files: RunFiles) -> dict[tuple[str, str], str]:
    """Return the values of `REALISED` keys that the rounds really used, first and last.

    Only keys whose value in a plan differs from the run file are included.
    """
    found: dict[tuple[str, str], str] = {}
    plans = [each for each in files.metrics if each.get("kind") == "plan"]
    for section, key in REALISED:
        values = [str(plan[key]) for plan in plans if key in plan]
        table = files.config.get(section)
        stated = str(table[key]) if isinstance(table, Mapping) and key in table else ""
        if not values or set(values) == {stated}:
            continue
        course = values[0] if len(set(values)) == 1 else f"first {values[0]}, last {values[-1]}"
        found[section, key] = f"{course} (chosen for the link; the run file begins with {stated})"
    return found


def setup(files: RunFiles) -> list[tuple[str, str]]:
    """Return (section.key, value) of the settings that decide how a model was trained."""
    keys = (
        ("outer", "method"), ("outer", "inner_steps"), ("outer", "fragments"), ("outer", "delay"),
        ("outer", "overlap"), ("outer", "learning_rate"), ("outer", "momentum"),
        ("compression", "codec"), ("control", "adapt"), ("inner", "optimizer"),
        ("inner", "learning_rate"), ("inner", "schedule"), ("inner", "weight_decay"),
        ("data", "sequence_length"),
        ("site", "batch_size"), ("site", "stages"), ("site", "shards"), ("site", "precision"),
        ("run", "seed"),
    )  # fmt: skip
    rows = []
    done = realised(files)
    for section, key in keys:
        table = files.config.get(section)
        if isinstance(table, Mapping) and key in table:
            rows.append((f"{section}.{key}", done.get((section, key), str(table[key]))))
    return rows
