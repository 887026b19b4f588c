"""What belongs into the bundle of some statements: the objects that these statements name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dilocox.record.log import statements as s
from dilocox.record.log.attestation_statements import Attestation
from dilocox.record.log.blob_store import BF16, MissingError, Stores
from dilocox.record.log.state_statements import AnchorState, State
from dilocox.record.log.step_statements import Step
from dilocox.record.verify.replay import behind, read_listing

STORE = "record/store/sha256"
_FLOAT = "float32"


@dataclass(frozen=True)
class StoredObject:
    """An object of the store that belongs into a bundle."""

    digest: str
    tensor: bool
    """True for a tensor in fp32. It is published in half of the bytes if bf16 holds its values."""

    @property
    def name(self) -> str:
        """Path of the object in a bundle; a tensor may get the suffix `BF16`."""
        return f"{STORE}/{self.digest[:2]}/{self.digest[2:]}"

    def load(self, stores: Stores) -> tuple[str, bytes]:
        """Return (path in the bundle, bytes). Raises `RecordError`."""
        data = stores.get(self.digest)
        if self.tensor and data and not any(data[0::4]) and not any(data[1::4]):
            upper = bytearray(len(data) // 2)
            upper[0::2], upper[1::2] = data[2::4], data[3::4]
            return self.name + BF16, bytes(upper)
        return self.name, data


@dataclass
class Contents:
    """Objects that statements name, without those of earlier statements."""

    known: set[str] = field(default_factory=set)
    """SHA-256 of objects that earlier statements name."""

    def skip(self, statements: Iterable[s.Statement]) -> None:
        """Leave out the objects that these statements name, because they are published."""
        for statement in statements:
            self.known.update(_subjects(statement))

    def named(
        self, statements: Iterable[s.Statement], stores: Stores, anchors: bool = False
    ) -> tuple[list[StoredObject], dict[str, int]]:
        """Return the objects that `statements` name, sorted, and the missing ones.

        `anchors`: True to take states from which a replay may begin, as far as they are stored.
        Their absence is not counted. Raises `RecordError` for malformed statements and objects.

        The missing objects are given by SHA-256, each with the position in `statements` of the last
        statement that names it.
        """
        found: dict[str, StoredObject] = {}
        missing: dict[str, int] = {}
        for position, statement in enumerate(statements):
            for each in _objects(statement, stores, anchors):
                if each.digest in self.known or each.digest in found:
                    continue
                if stores.has(each.digest):
                    found[each.digest] = each
                    missing.pop(each.digest, None)  # it has just arrived
                else:
                    missing[each.digest] = position
        return sorted(found.values(), key=lambda each: each.name), dict(sorted(missing.items()))


def _subjects(statement: s.Statement) -> list[str]:
    kept = (s.STEP, s.CHECKPOINT, s.ATTESTATION)
    return list(statement.subjects.values()) if statement.kind in kept else []


def _objects(statement: s.Statement, stores: Stores, anchors: bool) -> Iterator[StoredObject]:
    if statement.kind == s.STEP:
        step = Step.of(statement)
        for digest in step.payloads.values():
            yield StoredObject(digest, False)
            try:
                parts = behind(step, stores.get(digest)) if _has_parts(step) else []
            except MissingError:
                continue  # the caller has counted the payload itself
            yield from (StoredObject(part, False) for part in parts)
    elif statement.kind == s.CHECKPOINT:
        state = State.of(statement, 0)
        listings = [(state.root, state.listing), *filter(None, [state.published])]
        yield from (StoredObject(listing, False) for _, listing in listings)
        if state.kind == "initial":
            yield from _tensors(stores, state.listing, state.root)
    elif statement.kind == s.ATTESTATION:
        # No replay needs it, and a site may keep its evidence to itself: it is not missed.
        evidence = Attestation.of(statement).evidence
        if stores.has(evidence):
            yield StoredObject(evidence, False)
    elif statement.kind == s.ANCHOR and anchors:
        anchor = AnchorState.of(statement)
        if stores.has(anchor.listing):
            yield StoredObject(anchor.listing, False)
            for each in _tensors(stores, anchor.listing, anchor.root):
                if stores.has(each.digest):
                    yield each


def _tensors(stores: Stores, listing: str, root: str) -> Iterator[StoredObject]:
    try:
        tensors = read_listing(stores.get, listing, root)
    except MissingError:
        return  # the caller has counted the list itself
    yield from (StoredObject(each.sha256, each.dtype == _FLOAT) for each in tensors)


def _has_parts(step: Step) -> bool:
    """Return True if payloads of a step name further objects."""
    return bool(behind(step, bytes(32)))
