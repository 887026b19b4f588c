"""Registries of named records: the built-in ones, and those that other packages bring.

Another package registers a record with a call before the run file is resolved, or offers the record
as an entry point (`importlib.metadata`). An entry point is loaded when its name is first looked up.
Ranks are forked on Linux and inherit the records of their parent. A fresh process (`dilocox join`,
`dilocox verify`, ranks on systems that spawn) knows entry points only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from dilocox.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")


class Named(Protocol):
    """A record of a registry."""

    @property
    def name(self) -> str:
        """Name of the record, as run files write it."""
        ...


Record = TypeVar("Record", bound=Named)


class Registry(Generic[Record]):
    """Records of one type by name, in order of registration."""

    def __init__(
        self,
        group: str,
        record: type[Record],
        built_in: Iterable[Record],
        problem: Callable[[Record], str | None],
    ) -> None:
        """Create a registry.

        Args:
            group: Entry-point group of the records.
            record: Type of the records.
            built_in: Records that the registry begins with.
            problem: Returns the reason against a new record, or None.
        """
        self._group, self._type, self._problem = group, record, problem
        self.records = {each.name: each for each in built_in}
        """The records that this process knows. Entry points join them once they are loaded."""

    def add(self, record: Record) -> None:
        """Register `record`. Registering an equal record again changes nothing.

        Raises `ConfigError` if the name is malformed or belongs to another record, or if `problem`
        gives a reason against the record.
        """
        if not _NAME.fullmatch(record.name):
            raise ConfigError(
                f"{self._group}: {record.name!r} is no name; use up to 31 lower-case letters, "
                "digits, hyphens and underscores, with a letter first"
            )
        problem = self._problem(record)
        if problem is not None:
            raise ConfigError(f"{self._group}: {record.name}: {problem}")
        known = self.records.setdefault(record.name, record)
        if known != record:
            raise ConfigError(
                f"{self._group}: there is a {record.name!r} already; choose another name"
            )

    def find(self, name: str) -> Record | None:
        """Return the record of that name, or None. Loads the entry point of that name if needed.

        Raises `ConfigError` if the entry point does not give a valid record of that name.
        """
        if name not in self.records and name in _points(self._group):
            self.add(self._loaded(name, _points(self._group)[name]))
        return self.records.get(name)

    def not_loaded(self) -> list[str]:
        """Return the names of the entry points that are not loaded yet."""
        return [name for name in _points(self._group) if name not in self.records]

    def _loaded(self, name: str, point: EntryPoint) -> Record:
        where = f"entry point {name!r} of {self._group} ({point.value})"
        try:
            found = point.load()
        except Exception as error:
            raise ConfigError(
                f"{where}: {type(error).__name__}: {error}; mend or remove the package that has it"
            ) from error
        if not isinstance(found, self._type) or found.name != name:
            raise ConfigError(f"{where}: it must be a {self._type.__name__} named {name!r}")
        return found


@lru_cache(maxsize=8)
def _points(group: str) -> dict[str, EntryPoint]:
    """Return the installed entry points of a group, by name."""
    return {point.name: point for point in entry_points(group=group)}
