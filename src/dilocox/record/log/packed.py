"""Compact mappings for the millions of digests in a record: values as bytes, shared keys.

The mappings are used like dicts. Each access builds a new value from the bytes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from dilocox.record.log.step_statements import Commitment, Step

Place = tuple[str, int]
"""(site, shard)."""
Key = TypeVar("Key", bound=tuple[Any, ...])
Value = TypeVar("Value")
Name = TypeVar("Name", bound=Hashable)
_DIGEST = 32
OPEN = 256
"""Number of newest exchanges that stay dicts (`_ByExchange`): the exchanges of a few rounds."""


def _packed(digest: str) -> bytes | str:
    """Pack a SHA-256 of 64 hex digits into 32 bytes; return any other text unchanged."""
    try:
        found = bytes.fromhex(digest)
    except ValueError:
        return digest
    return found if len(found) == _DIGEST and found.hex() == digest else digest


def _text(found: bytes | str) -> str:
    return found if isinstance(found, str) else found.hex()


_Closed = tuple[tuple[Place, ...], bytes]
"""Places of an exchange, and their values: one after the other, each of the same length."""


class _ByExchange(MutableMapping[Key, Value], Generic[Key, Value]):
    """Mapping with keys that begin with an exchange and end in a place (site, shard).

    A run has few places, so exchanges share them. The values of the newest exchanges are in dicts.
    Older exchanges are closed: their values are packed into bytes until one of them changes.
    """

    def __init__(self) -> None:
        self._inner: dict[tuple[Any, ...], dict[Place, Any] | _Closed] = {}
        self._places: dict[Place, Place] = {}
        self._layouts: dict[tuple[Place, ...], tuple[Place, ...]] = {}
        self._open: deque[tuple[Any, ...]] = deque()

    def __getitem__(self, key: Key) -> Value:
        inner, place = self._inner[key[:-2]], key[-2:]
        if isinstance(inner, dict):
            return self._unpack(inner[place])
        places, data = inner
        size, number = len(data) // len(places), _numbered(places)[place]
        return self._unpack(data[number * size : (number + 1) * size])

    def __setitem__(self, key: Key, value: Value) -> None:
        place = self._places.setdefault(key[-2:], key[-2:])
        self._opened(key[:-2])[place] = self._pack(value)

    def __delitem__(self, key: Key) -> None:
        if key[-2:] not in self._there(self._inner[key[:-2]]):
            raise KeyError(key)
        inner = self._opened(key[:-2])
        del inner[key[-2:]]
        if not inner:
            del self._inner[key[:-2]]
            with contextlib.suppress(ValueError):  # an exchange that could not be closed
                self._open.remove(key[:-2])

    def __iter__(self) -> Iterator[Key]:
        for head, inner in self._inner.items():
            for place in self._there(inner):
                yield (*head, *place)  # type: ignore[misc]

    def __len__(self) -> int:
        return sum(len(self._there(inner)) for inner in self._inner.values())

    def keep(self, exchanges: Iterable[str]) -> None:
        """Remove entries of all exchanges except `exchanges`, which are exchange keys."""
        known = set(exchanges)
        self._inner = {head: inner for head, inner in self._inner.items() if head[0] in known}
        self._open = deque(head for head in self._open if head in self._inner)

    @staticmethod
    def _there(inner: dict[Place, Any] | _Closed) -> Collection[Place]:
        return inner if isinstance(inner, dict) else inner[0]

    def _opened(self, head: tuple[Any, ...]) -> dict[Place, Any]:
        """Return the dict of an exchange; unpack or create it if needed."""
        inner = self._inner.get(head)
        if isinstance(inner, dict):
            return inner
        found: dict[Place, Any] = {}
        if inner is not None:
            places, data = inner
            size = len(data) // len(places)
            found = {place: data[n * size : (n + 1) * size] for n, place in enumerate(places)}
        self._inner[head] = found
        self._open.append(head)
        if len(self._open) > OPEN:
            self._close(self._open.popleft())
        return found

    def _close(self, head: tuple[Any, ...]) -> None:
        inner = self._inner[head]
        assert isinstance(inner, dict)
        values = list(inner.values())
        # Values that are not digests could not be packed into bytes. An exchange with such a value
        # stays a dict; no honest log has any.
        if all(isinstance(each, bytes) and len(each) == len(values[0]) for each in values):
            places = self._layouts.setdefault(tuple(inner), tuple(inner))
            self._inner[head] = places, b"".join(values)

    def _pack(self, value: Value) -> Any:
        raise KeyError(value)

    def _unpack(self, found: Any) -> Value:
        raise KeyError(found)


class Contributions(_ByExchange[tuple[str, int, str, int], str]):
    """SHA-256 of payloads, hex, by (exchange key, attempt, site, shard)."""

    def _pack(self, value: str) -> bytes | str:
        return _packed(value)

    def _unpack(self, found: bytes | str) -> str:
        return _text(found)


class Commitments(_ByExchange[tuple[str, str, int], Commitment]):
    """Commitments by (exchange key, site, shard)."""

    def _pack(self, value: Commitment) -> bytes | Commitment:
        values = _packed(value.values)
        payload = b"" if value.payload is None else _packed(value.payload)
        if isinstance(values, str) or isinstance(payload, str):
            return value
        return value.number.to_bytes(8, "little") + values + payload

    def _unpack(self, found: bytes | Commitment) -> Commitment:
        if isinstance(found, Commitment):
            return found
        values, payload = found[8 : 8 + _DIGEST], found[8 + _DIGEST :]
        number = int.from_bytes(found[:8], "little")
        return Commitment(values.hex(), payload.hex() or None, number)


class Said(Mapping[str, Any]):
    """A statement's predicate, kept compressed; each access unpacks all of it."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self._data = zlib.compress(json.dumps(dict(said), separators=(",", ":")).encode(), 1)

    def _found(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(zlib.decompress(self._data))
        return found

    def __getitem__(self, name: str) -> Any:
        return self._found()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())

    def items(self) -> Any:
        """Return the items of the predicate, unpacking only once."""
        return self._found().items()


@functools.lru_cache(maxsize=256)
def _numbered(names: tuple[Name, ...]) -> dict[Name, int]:
    """Return each name's index in `names`; many steps share the same names."""
    return {name: number for number, name in enumerate(names)}


class Digests(Mapping[str, str]):
    """Mapping from name to SHA-256, hex."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        """Pack `digests`, whose values must be 64 lower-case hex digits."""
        self._numbers = _numbered(tuple(digests))
        self._data = bytes.fromhex("".join(digests.values()))

    def __getitem__(self, name: str) -> str:
        start = _DIGEST * self._numbers[name]
        return self._data[start : start + _DIGEST].hex()

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def packed_step(step: Step) -> Step:
    """Return an equal step in a tenth of the memory."""
    return replace(step, said=Said(step.said), payloads=Digests(step.payloads))
