"""Checks that an audit repeats steps on the base model that the site has named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.errors import ModelError
from dilocox.models.base_weights import base_digest
from dilocox.models.hf_weights import locate_weights


def base_problem(
    config: RunConfig, enrolments: Iterable[Mapping[str, Any]], site: str
) -> str | None:
    """Return why `site`'s steps cannot be repeated on the base model here; None if they can.

    None as well if the run has no adapters. `enrolments`: those of the log.
    """
    if config.adapter is None:
        return None
    named = {str(each.get("base")) for each in enrolments if each["site"] == site}
    try:
        digest = _digest(str(config.model.path), config.model.revision)
    except ModelError as error:
        return str(error)
    if digest in named:
        return None
    return (
        f"{config.model.path}: base model with digest {digest[:12]}…, the site named "
        f"{', '.join(sorted(f'{each[:12]}…' for each in named))}"
    )


@cache
def _digest(path: str, revision: str | None) -> str:
    return base_digest(locate_weights(path, revision))
