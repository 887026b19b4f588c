"""Check that a run file is the one that the sites of a record agreed on.

The check also works for records of other dilocox versions. A later version may know keys that the
record does not have. The agreement says nothing about such keys, so a run file may only have them
at their defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dilocox.config.run_config import FORMER_DEFAULTS, RunConfig, digest_of, load_written
from dilocox.errors import ConfigError, RecordError

Values = Mapping[str, Any]


def agreed_run(path: Path, manifest: Values) -> RunConfig:
    """Load the run file at `path`, and check that it is the one of the record's `manifest`.

    Raises `RecordError` if the run file differs or cannot be read, or if the manifest contradicts
    itself.
    """
    try:
        config = load_written(path)
    except ConfigError as error:
        raise RecordError(str(error)) from None
    _check(str(path), config, config.shared(), manifest)
    return config


def check_own_run_file(config: RunConfig, manifest: Values) -> None:
    """Raise `RecordError` unless a site's run file is the one of a record's `manifest`.

    A key at its default may have had another default when the run was begun.
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
    """Return the first key whose value differs from the agreed value; None if there is none.

    All arguments have the form of `RunConfig.shared`.

    Args:
        agreed: The record's values.
        resolved: The run file's values, with this version's defaults.
        chosen: The run file's values that are not defaults.
    """
    there, here, said = dict(_leaves(agreed)), dict(_leaves(resolved)), dict(_leaves(chosen))
    for key in sorted({*there, *here}):
        if key not in there and key not in said:
            continue  # a key that the record's version did not have, at its default
        if key not in here or key not in there or there[key] != here[key]:
            return ".".join(key)
    return None


def _same_keys(values: Values, like: Values) -> dict[str, Any]:
    """Return `values` restricted to the keys of `like`.

    Canonical JSON has turned the record's 1.0 into 1, so the values must come from the run file.
    """
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
