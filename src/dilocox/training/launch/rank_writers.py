"""Opens what one rank writes into the run's record: outer statements, and states for audits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.protocol.messages import RankId as RankName
from dilocox.errors import DilocoxError, RecordError
from dilocox.record.log.blob_store import Store
from dilocox.record.log.statements import Signer
from dilocox.record.writer.dispersal import Dispersal
from dilocox.record.writer.dispersal_journal import Journal
from dilocox.record.writer.rank_recorder import RankRecord, SigningIdentity
from dilocox.record.writer.state_recorder import InnerRecord, RecordingPolicy
from dilocox.record.writer.windows import Windows, bound_of
from dilocox.training.builder import RankParts
from dilocox.training.determinism_class import facts_here
from dilocox.training.launch.rank_job import RankJob


def open_record(job: RankJob, rank: RankParts, client: CoordinatorClient) -> RankRecord | None:
    """Return the writer of this rank's part of the record. None if the run is not recorded."""
    if not job.identity.record_run:
        return None
    patience = job.config.network.link_timeout
    store = Store(job.config.record_store, patience)
    windows = _open_windows(job, rank, store, warning_to(client))
    record = RankRecord(author_of(job), store, client, warning_to(client), patience, windows)
    record.dispersal = _open_dispersal(job, store, client)
    return record


def _open_dispersal(job: RankJob, store: Store, client: CoordinatorClient) -> Dispersal | None:
    """Return what cuts this rank's payloads into pieces. None without `[availability]`."""
    config, place = job.config, job.place
    if config.availability is None:
        return None
    # A name with a dot first: `dilocox publish` leaves such files out.
    name = f".custody-{place.site}-{place.stage}.{place.shard}.jsonl"
    journal = Journal(config.folder / "record" / name)
    code = config.availability.code(config.sites)
    keep_whole = config.availability.keep_whole
    return Dispersal(author_of(job), store, client, warning_to(client), code, journal, keep_whole)


def _open_windows(
    job: RankJob, rank: RankParts, store: Store, warn: Callable[[str], None]
) -> Windows | None:
    """Return the windows that remove old payloads of this rank. None if all payloads stay."""
    place = job.place
    bound = bound_of(job.config, rank.blueprint.trained)
    if bound is None:
        return None
    name = f"{place.site}/{place.stage}.{place.shard}"
    try:
        return Windows(store, name, bound.for_one_of(job.config.site.exchanging_ranks))
    except RecordError as error:  # a store that cannot be reached does not end the run
        warn(f"record: {error}; all payloads stay")
        return None


def open_rounds(job: RankJob, rank: RankParts, client: CoordinatorClient) -> InnerRecord | None:
    """Return the writer of this rank's states. None if no states are kept for audits."""
    config, place = job.config, job.place
    if not job.identity.record_run or config.record.states_every == 0:
        return None
    manner = RecordingPolicy(
        every=config.record.states_every,
        keep=config.record.states_keep,
        private=config.sites[place.site].data is not None,
        facts=facts_here(config, rank.mesh.device, rank.model.whole_gradients),
        replaced=job.hooks.replaced,
    )
    patience = config.network.link_timeout
    store = Store(config.record_store, patience)
    return InnerRecord(author_of(job), manner, store, client, warning_to(client), patience)


def author_of(job: RankJob) -> SigningIdentity:
    """Return the identity with which this rank signs statements."""
    place, identity = job.place, job.identity
    name = RankName(site=place.site, stage=place.stage, shard=place.shard)
    return SigningIdentity(identity.record_run, name, Signer.from_hex(identity.record_key))


def warning_to(client: CoordinatorClient) -> Callable[[str], None]:
    """Return a function that reports a warning to the coordinator, if it can be reached."""

    def warn(text: str) -> None:
        with contextlib.suppress(DilocoxError):
            client.report(0, {"text": text}, kind="warning")

    return warn
