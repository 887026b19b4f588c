"""Acceptance: a site's first signed statement, that it takes part in the run of a manifest.

The log's first entry is the manifest: the run file, and digests of data and code. The SHA-256 of
this entry is the run's id, which every later statement names. So the holder of the log's key cannot
put another manifest under statements that sites have signed. In its acceptance a site also signs
its own data digest, versions and key. Otherwise a reader would have only the coordinator's word for
these.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.identity import Identity
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.digests import digest_text
from dilocox.record.log.run_file_check import check_own_run_file
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.state_statements import whole

_CHOSEN = re.compile("[0-9a-f]{32}")
"""Form of run ids in records of versions in which the id was random."""


@dataclass(frozen=True)
class OwnFacts:
    """Facts that a site states about itself when it joins."""

    data: str | None
    """Digest of the token files that all sites share, 64 hex digits; None: the site has none."""
    own_data: str | None
    """Digest of the site's own token files (`sites.NAME.data`); None if it has none."""
    code: str
    """SHA-256 over the site's dilocox source files (see `code_digest`)."""
    versions: Mapping[str, str]
    """Versions by package, as in the site's request to join."""
    base: str | None = None
    """Digest of the site's frozen base model, 64 hex digits; None: the run has no adapters."""


@dataclass(frozen=True)
class Acceptance:
    """A site's signed acceptance of a manifest, made at each start of the site."""

    site: str
    incarnation: int
    key: str
    """The site's public key, 64 hex digits."""
    manifest: str
    """SHA-256 of the log's first entry."""
    facts: OwnFacts
    number: int
    """Index of the statement in the log, from 0."""

    @classmethod
    def of(cls, statement: s.Statement, number: int) -> Acceptance:
        """Parse statement `number` of the log. Raises `RecordError` if it is malformed."""
        said = statement.predicate
        with whole(statement):
            return cls(
                site=str(said["site"]),
                incarnation=int(said["incarnation"]),
                key=digest_text(said["key"]),
                manifest=digest_text(statement.subjects["manifest"]),
                facts=OwnFacts(
                    data=None if said["data"] is None else digest_text(said["data"]),
                    own_data=None if said["own_data"] is None else digest_text(said["own_data"]),
                    code=digest_text(said["code"]),
                    versions={str(name): str(one) for name, one in said["versions"].items()},
                    base=digest_text(said["base"]) if "base" in said else None,
                ),
                number=number,
            )

    def statement(self, run: str) -> s.Statement:
        """Build the statement for the run with id `run`; the inverse of `of`."""
        return s.Statement(
            s.ACCEPTANCE,
            {"manifest": self.manifest},
            {
                "run": run,
                "site": self.site,
                "incarnation": self.incarnation,
                "key": self.key,
                "data": self.facts.data,
                "own_data": self.facts.own_data,
                "code": self.facts.code,
                "versions": dict(self.facts.versions),
                **({} if self.facts.base is None else {"base": self.facts.base}),
            },
        )


def digest_of_entry(entry: str) -> str:
    """Return the SHA-256, hex, of an entry of the log."""
    return hashlib.sha256(entry.encode()).hexdigest()


def is_bound(manifest: Mapping[str, Any]) -> bool:
    """Return True if the run's id is this manifest's digest; in older records the id is random."""
    return "run" not in manifest


def run_of(entry: str, manifest: Mapping[str, Any]) -> str:
    """Return the run's id, given the log's first entry and its manifest.

    An older manifest names a random id of 32 hex digits. Raises `RecordError` if the manifest names
    another form of id: a digest there means that somebody has replaced the entry with that digest.
    """
    if is_bound(manifest):
        return digest_of_entry(entry)
    named = str(manifest["run"])
    if not _CHOSEN.fullmatch(named):
        raise RecordError(
            f"the manifest names run {named[:12]!r}: no id that a manifest may choose"
        )
    return named


def accept(config: RunConfig, identity: Identity, entry: str, facts: OwnFacts) -> str:
    """Check the manifest at a site that has just joined; return the site's signed acceptance.

    Args:
        config: The site's run file.
        identity: The site's identity in the run, with its signing key.
        entry: The log's first entry, as the coordinator has sent it.
        facts: The site's facts, to be signed.

    Raises:
        RecordError: `entry` is not the manifest of this run: its id, run file or data digest
            differs from the site's own.
    """
    statement, envelope = s.opened(entry)
    manifest = statement.predicate
    if statement.kind != s.MANIFEST or run_of(entry, manifest) != identity.record_run:
        raise RecordError("the coordinator's manifest does not have the digest that it announced")
    s.check_signature(envelope, NoteKey.parse(str(manifest.get("log"))).public.hex())
    with whole(statement):
        check_own_run_file(config, manifest)
        named = (manifest["data"] or {}).get("manifest")
    if named is not None and facts.data is not None and named != facts.data:
        raise RecordError(
            f"token files: digest {facts.data[:12]}… here, {named[:12]}… in the coordinator's "
            "manifest; copy the data folder from the other sites to the coordinator, or remove the "
            "coordinator's"
        )
    signer = s.Signer.from_hex(identity.record_key)
    said = Acceptance(
        identity.site, identity.incarnation, signer.public, digest_of_entry(entry), facts, 0
    )
    return signer.sign(said.statement(identity.record_run))


@dataclass
class Acceptances:
    """The notary's state of enrolments and acceptances during a run."""

    manifest: str = ""
    """The log's first entry."""
    bound: bool = False
    """True if the run's id is the digest of the manifest (`is_bound`)."""
    enrolments: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Latest enrolment by site."""
    accepted: dict[str, Acceptance] = field(default_factory=dict)
    """Acceptance by site, made since the site's latest enrolment."""

    def begun(self, entry: str, manifest: Mapping[str, Any]) -> None:
        """Set the log's first entry and its manifest."""
        self.manifest, self.bound = entry, is_bound(manifest)

    def remember(self, statement: s.Statement) -> None:
        """Process a statement that has been appended to the log."""
        if statement.kind == s.ENROLMENT:
            site = str(statement.predicate["site"])
            self.enrolments[site] = statement.predicate
            self.accepted.pop(site, None)
        elif statement.kind == s.ACCEPTANCE:
            found = Acceptance.of(statement, 0)
            self.accepted[found.site] = found

    def lacks(self, site: str) -> bool:
        """Return True if the site must sign an acceptance before any other statement.

        In runs that began with an older dilocox, sites sign no acceptance.
        """
        return self.bound and site not in self.accepted

    def why_not(self, found: Acceptance) -> str | None:
        """Return the reason why an acceptance is refused; None if it is valid."""
        enrolment = self.enrolments.get(found.site, {})
        if found.manifest != digest_of_entry(self.manifest):
            return "its acceptance names another manifest"
        for name, here in (
            ("incarnation", found.incarnation), ("key", found.key), ("data", found.facts.data),
            ("versions", dict(found.facts.versions)), ("base", found.facts.base),
        ):  # fmt: skip
            if enrolment.get(name) != here:
                return f"its acceptance names another {name} than its request to join"
        known = self.accepted.get(found.site)
        return None if known in (None, found) else "it has signed a different acceptance before"
