"""Checks that the stores have all objects that a replay needs, step by step.

The list of all objects of a long run is larger than memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from dilocox.errors import RecordError
from dilocox.record.log.blob_store import MissingError
from dilocox.record.log.digests import TensorDigest
from dilocox.record.log.state_statements import State
from dilocox.record.log.step_statements import Step
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.final_lists import final_list
from dilocox.record.verify.origins import Origin, replays
from dilocox.record.verify.replay import behind
from dilocox.record.verify.run_history import RunHistory

REMEMBERED = 100_000
"""Latest objects that are not read again when they are needed again."""
Listing = Callable[[State], list[TensorDigest]]
"""Returns the tensors of a signed state."""


@dataclass
class Needed:
    """Reads and counts objects."""

    get: Callable[[str], bytes]
    """Returns the bytes of a SHA-256, hex. Raises `RecordError`."""
    count: int = 0
    """Number of objects read; an object needed again much later counts twice."""
    size: int = 0
    """Bytes of these objects."""
    others: set[str] = field(default_factory=set)
    """Sites that have signed another list of final tensors than the one that is used."""
    _seen: dict[str, None] = field(default_factory=dict)

    def read(self, digest: str, name: str, step: Step | None = None) -> None:
        """Read an object, and the objects to which it refers as a payload of `step`.

        `name`: names the object in messages. Raises `NotRunError` if no store has an object, and
        `RecordError` if its bytes are damaged.
        """
        if digest in self._seen:
            return
        data = self._fetched(digest, name)
        self._seen[digest] = None
        if len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self.count, self.size = self.count + 1, self.size + len(data)
        for part in behind(step, data) if step is not None else ():
            self.read(part, f"part of a {name}")

    def _fetched(self, digest: str, name: str) -> bytes:
        try:
            return self.get(digest)
        except MissingError as error:
            raise NotRunError(f"{name}: {error}; name more stores with --store") from None
        except RecordError as error:
            raise RecordError(f"{name}: {error}") from None


def read_needed(
    course: RunHistory,
    origins: Mapping[tuple[int, int], Origin],
    listing: Listing,
    needed: Needed,
    progress: Callable[[float], None],
) -> None:
    """Read all objects that a replay needs. Raises like `Needed.read`.

    Args:
        course: History of the run.
        origins: Start states of the replay by (stage, shard); others start with theta_0.
        listing: Returns the tensors of a signed state.
        needed: Reads and counts the objects.
        progress: Called with the share of steps done, from 0 to 1.
    """
    states = itertools.chain(_finals(course, needed), _states(course, origins, listing))
    for digest, name in states:
        needed.read(digest, name)
    for number, step in enumerate(course.steps.values()):
        for digest in step.payloads.values():
            if not origins or replays(origins, digest, step):
                needed.read(digest, f"payload of {step.key.text}", step)
        progress((number + 1) / len(course.steps))


def _finals(course: RunHistory, needed: Needed) -> Iterator[tuple[str, str]]:
    """Iterate over the lists of final tensors that are used, as (digest, name for messages)."""
    for stage, published in itertools.product(range(course.stages), (False, True)):
        try:
            found = final_list(course, stage, needed.get, published=published)
        except MissingError as error:
            raise NotRunError(f"{error}; name more stores with --store") from None
        if found is not None:
            needed.others.update(found.others)
            yield found.listing, f"list of stage {stage}'s final tensors"


def _states(
    course: RunHistory, origins: Mapping[tuple[int, int], Origin], listing: Listing
) -> Iterator[tuple[str, str]]:
    """Iterate over the needed objects that are not payloads, as (digest, name for messages)."""
    for origin in origins.values():
        for each in origin.tensors.values():
            yield each.sha256, f"the state of round {origin.state.round}, {each.name}"
    for stage in range(course.stages):
        for state in course.state("initial", stage)[-1:]:
            for each in listing(state):
                yield each.sha256, f"theta_0, {each.name}"
