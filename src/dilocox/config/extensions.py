"""Registries of named records: the built-in ones, and those that other packages bring.

A record of another package comes by a call before the run is resolved, or by an entry point
(`importlib.metadata`), which is loaded when its name is first asked for. Ranks are forked on Linux
and have what their parent has registered. A process that starts afresh (`dilocox join`, `dilocox
verify`, ranks on systems that spawn) has entry points alone.
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
    """A record that a registry holds."""

    @property
    def name(self) -> str:
        """Name in the run file."""
        ...


Record = TypeVar("Record", bound=Named)


class Registry(Generic[Record]):
    """Records of one type by name, in the order in which they came."""

    def __init__(
        self,
        group: str,
        record: type[Record],
        built_in: Iterable[Record],
        problem: Callable[[Record], str | None],
    ) -> None:
        """`group`: of the entry points that name records of type `record`; `problem`: why a record
        that is not built in cannot be, or None."""
        self._group, self._type, self._problem = group, record, problem
        self.records = {each.name: each for each in built_in}
        """All that this process knows by now; entry points that nobody asked for are not loaded."""

    def add(self, record: Record) -> None:
        """Take `record` in. Once more the same record changes nothing.

        Raises `ConfigError` for a name that another record has or that is no name, and for a record
        that cannot be.
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
        """The record of that name, from an entry point if there is one; None if nobody has it.

        Raises `ConfigError` for an entry point that does not give such a record.
        """
        if name not in self.records and name in _points(self._group):
            self.add(self._loaded(name, _points(self._group)[name]))
        return self.records.get(name)

    def not_loaded(self) -> list[str]:
        """Names of entry points that nobody has asked for yet."""
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
    """The installed entry points of a group, by name."""
    return {point.name: point for point in entry_points(group=group)}
