"""Keys of the run file that concern one machine alone: sites need not agree on them."""

from __future__ import annotations

from typing import Any

from dilocox.config.outputs import EvaluationSection

OF_ONE_MACHINE = {
    "run": ("folder",),
    "data": ("folder",),
    "site": ("device", "threads", "code"),
    "network": ("host", "port", "advertise", "interface", "congestion"),
    "checkpoint": ("store",),
    "evaluation": tuple(key for key in EvaluationSection.model_fields if key.startswith("tasks")),
    "record": ("store", "published", "anchor"),
    "availability": ("keep_whole",),
}
"""Keys, by section, that may differ between sites."""


def drop_own_keys(shared: dict[str, Any]) -> None:
    """Remove the keys of one machine from a run file, given as sections and keys."""
    for section, keys in OF_ONE_MACHINE.items():
        for key in keys:
            shared.get(section, {}).pop(key, None)
    for site in shared["sites"].values():
        for key in ("interface", "advertise", "ports"):
            site.pop(key, None)
        # Sites need not agree on the folder of private text. But they must agree that a site
        # has private text, because this site has token ranges of its own.
        if "data" in site:
            site["data"] = site["data"] is not None
