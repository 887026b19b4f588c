"""Is this run file the one that a record's sites had agreed on? Also for records by other versions.

A later version may know keys that the record does not have, and writes them with its defaults: what
was agreed on says nothing about them, so a run file may not set them to anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dilocox.config.run_config import FORMER_DEFAULTS, RunConfig, digest_of, load_written
from dilocox.errors import ConfigError, RecordError

Values = Mapping[str, Any]


def agreed_run(path: Path, manifest: Values) -> RunConfig:
    """The run file at `path`, which is the one of the record's `manifest`.

    Raises `RecordError` if it is another one, cannot be read, or the manifest contradicts itself.
    """
    try:
        config = load_written(path)
    except ConfigError as error:
        raise RecordError(str(error)) from None
    _check(str(path), config, config.shared(), manifest)
    return config


def check_own_run_file(config: RunConfig, manifest: Values) -> None:
    """Raise `RecordError` unless a site's run file is the one of a record's `manifest`.

    A key that stands at its default may have the default that it had when the run was begun.
    """
    resolved = config.shared()
    chosen = config.shared(without_defaults=True)
    for (section, key), former in FORMER_DEFAULTS.items():
        agreed = manifest["config"].get(section, {})
        if key not in chosen.get(section, {}) and agreed.get(key) == former:
            resolved[section][key] = former
    _check("this site's run file", config, resolved, manifest)


def _check(where: str, config: RunConfig, resolved: dict[str, Any], manifest: Values) -> None:
    agreed = manifest["config"]
    if key := first_difference(agreed, resolved, config.shared(without_defaults=True)):
        raise RecordError(f"{where}: {key} is not what the run was begun with")
    if digest_of(_same_keys(resolved, agreed)) != manifest["config_digest"]:
        raise RecordError("the manifest's run file is not the one with the digest that it names")


def first_difference(agreed: Values, resolved: Values, chosen: Values) -> str | None:
    """The first key in which a run file says something else than was agreed on; None: in none.

    As `RunConfig.shared` gives them: `agreed` the record's values, `resolved` the run file's with
    this version's defaults, `chosen` those of it that are no defaults.
    """
    there, here, said = dict(_leaves(agreed)), dict(_leaves(resolved)), dict(_leaves(chosen))
    for key in sorted({*there, *here}):
        if key not in there and key not in said:
            continue  # a key that came later, at its default
        if key not in here or key not in there or there[key] != here[key]:
            return ".".join(key)
    return None


def _same_keys(values: Values, like: Values) -> dict[str, Any]:
    """`values` with the keys of `like` alone. Canonical JSON has made 1 of the record's 1.0."""
    return {
        name: _same_keys(values[name], other) if isinstance(other, Mapping) else values[name]
        for name, other in like.items()
    }


def _leaves(values: Values, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value
