"""What a reader gives to a verification: where a run's parts are, and what else is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dilocox.record.verify import claims as c
from dilocox.record.verify.chain_anchors import ChainHeads
from dilocox.record.verify.machine_claims import MachineJudge
from dilocox.record.verify.witness_claims import Witnesses


@dataclass(frozen=True)
class Places:
    """Locations of the parts of a run, and facts that the reader knows from elsewhere."""

    run: Path
    """The run's folder, with `record/` and `run.toml`."""
    stores: Sequence[str] = ()
    """Further stores, beside the folder's own."""
    model: Path | None = None
    """The published model; None: `model/` in the run's folder."""
    data: Path | None = None
    """Token files; None: where the run file says."""
    start: Path | None = None
    """Folder that the reader knows to be `model.path`; None: what this machine has."""
    key: str | None = None
    """The log's key, from another source than the record; None: the record's `log.pub`."""
    seen: Path | None = None
    """A checkpoint of the log that the reader kept from an earlier verification."""
    release_key: Path | None = None
    """Public key, PEM, of the model folder's signature; None: the key file beside that folder."""
    auditors: Sequence[str] = ()
    """Public keys, hex, of auditors whose verdicts count; empty: all auditors."""
    randomness: Mapping[int, bytes] = field(default_factory=dict)
    """Public randomness by round, which the reader has looked up at its source."""
    adapters: Path | None = None
    """Folder that the reader knows to be `adapter.path` or `adapter.handover`; None: what this
    machine has."""
    chain: ChainHeads | None = None
    """What a chain says about the run; None: no chain was asked."""
    witnesses: Witnesses | None = None
    """Witnesses of the log that the reader trusts; None: none was named."""
    machines: MachineJudge | None = None
    """Judges evidence of machines; None: the reader has given no policy."""

    def asked(self, of_adapters: bool) -> list[c.Claim]:
        """Return the claims that the reader has asked for, as required claims.

        They are required also if the run has no such facts. The claim `beacon` is not among them:
        only an audited run can have it. `of_adapters`: whether the run trains adapters. `start`
        then names their base model.
        """
        begun = self.adapters is not None or (self.start is not None and not of_adapters)
        given = {
            c.START: begun,
            c.BASE: of_adapters and self.start is not None,
            c.RELEASE: self.release_key is not None,
            c.ATTESTATIONS: self.machines is not None,
            c.ANCHORS: self.chain is not None,
            c.WITNESSES: self.witnesses is not None,
            c.DATA: self.data is not None,
            c.AUDITS: bool(self.auditors),
        }
        return [c.asked(claim) for claim, is_given in given.items() if is_given]
