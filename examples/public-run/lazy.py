"""A cheat: `dilocox join` with a site that leaves out every second inner step.

It says that it has taken all of them. An auditor who repeats a round finds it out.
"""

from __future__ import annotations

import sys
from typing import Any

from dilocox.cli.main import main
from dilocox.inner.site_model import SiteModel

honest = SiteModel.inner_step
taken: list[Any] = []


def lazy_step(model: SiteModel, *arguments: Any) -> Any:
    """Take a step, or give the result of the last one again."""
    if not taken or len(taken) % 2 == 0:
        taken.append(honest(model, *arguments))
    else:
        taken.append(taken[-1])
    return taken[-1]


SiteModel.inner_step = lazy_step  # type: ignore[method-assign]
main(["join", *sys.argv[1:]])
