"""One site of a run: it enrols, starts its ranks and watches over them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.client.enrolment import enrol, installed_versions
from dilocox.coordinator.client.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    SiteGoneError,
)
from dilocox.coordinator.client.transport import host_and_port
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.messages import RankId as RankName
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.record_keys import RecordKey, key_file
from dilocox.data import TokenFiles
from dilocox.errors import DilocoxError, JoinError, RecordError, RetryLaterError
from dilocox.record.log.acceptance import OwnFacts, accept
from dilocox.record.log.manifest import code_digest
from dilocox.training.builder import Hooks, RankPlace
from dilocox.training.launch import site_log
from dilocox.training.launch.rank import STOPPED, RankJob, run_rank
from dilocox.training.launch.supervisor import Ended, keep_in_run, listening, print_error
from dilocox.training.rank_errors import HOST_MEND
from dilocox.transport.link.endpoint import check_ports
from dilocox.transport.link.tcp import check_congestion
from dilocox.utils import processes
from dilocox.utils.chrome_trace import part_path


def run_site(
    config: RunConfig,
    site: str,
    endpoint: Endpoint,
    hooks: Hooks,
    debug: bool,
    folder: Path,
    shared_folder: bool,
    trace: bool = False,
) -> Ended:
    """Enrol a site, start its ranks and watch over them; how it ended.

    A rank that dies takes its site down: the others are told at once, and the ranks ended.
    `trace`: every rank records its timeline below `folder` (see `trace_file.part_path`).
    Raises `JoinError`, or `ConfigError` for ports that cannot be used.
    """
    # Sites that share a machine share its GPUs: each begins after those of the sites before.
    first = list(config.sites).index(site) * config.site.ranks if shared_folder else 0
    address = exchange_address(config, site, endpoint.url)
    check_ports(site, config.sites[site], config.site.exchanging_ranks, address)
    check_congestion(config.network.congestion)
    identity = enrol_site(config, site, endpoint)
    errors = processes.CONTEXT.SimpleQueue()
    # A site that was given address and token alone: nobody else at its terminal shows the run.
    news = None if endpoint.operator else processes.CONTEXT.SimpleQueue()
    if news is not None:
        where = endpoint.url.removeprefix("https://")
        site_log.say(site_log.joined(site, config.run.name, where))
        site_log.note_joined(config, site, where)
    ranks_here = config.site.ranks * (len(config.sites) if shared_folder else 1)
    ranks: list[BaseProcess] = []
    # A folder that only this user can enter: nobody else makes the file before the ranks do.
    private = tempfile.mkdtemp(prefix=f"dilocox-{site}-")
    try:
        for number in range(config.site.ranks):
            place = RankPlace.of_rank(site, number, config.site)
            job = RankJob(
                config=config,
                place=place,
                url=endpoint.url,
                identity=identity,
                hooks=hooks,
                address=address,
                meeting=f"{private}/ranks",
                local_rank=first + number,
                ranks_here=ranks_here,
                shared_folder=shared_folder,
                log_file=folder / "logs" / f"{place.file_name}.log",
                debug=debug,
                trace=part_path(folder, site, place.stage, place.shard)
                if trace and place.exchanges
                else None,
                tell=None if news is None else news.put,
            )
            ranks.append(processes.start(_rank_in_child, job, errors, name=place.file_name))
        return _watch(SiteLine(config, site, endpoint, identity), ranks, errors, news)
    finally:
        processes.end(ranks, grace=0.0)
        _show(news)
        shutil.rmtree(private, ignore_errors=True)


def keep_site(
    config: RunConfig,
    site: str,
    endpoint: Endpoint,
    hooks: Hooks,
    debug: bool,
    folder: Path,
    shared_folder: bool,
    trace: bool = False,
) -> int:
    """`run_site`, and again after every crash for as long as the run lasts; exit code."""
    ended = keep_in_run(
        site,
        lambda: run_site(config, site, endpoint, hooks, debug, folder, shared_folder, trace),
        Timeouts.derive(config.network),
        print_error,
    )
    if ended.code == 1:
        print_error(ended.reason)
    if not endpoint.operator:
        site_log.note(config, site, "ended", code=ended.code, reason=ended.reason)
    return ended.code


def _rank_in_child(job: RankJob, errors: Any) -> None:
    code = run_rank(job, lambda line, permanent: errors.put((line, permanent)))
    if code:
        processes.exit_now(code)
    sys.exit(code)


def enrol_site(config: RunConfig, site: str, endpoint: Endpoint) -> Identity:
    """Tell the coordinator that `site` is there; its ranks have to beat soon after.

    Which token files all sites share is told by a site with text of its own as well.
    """
    versions, data = installed_versions(), TokenFiles.open(config.data_folder).digest
    identity, reply = enrol(
        endpoint.url,
        endpoint.tokens[site],
        site=site,
        run_digest=config.digest(),
        stages=config.site.stages,
        shards=config.site.shards,
        versions=versions,
        data_digest=data,
        timeouts=Timeouts.derive(config.network),
        record_key=RecordKey.kept(endpoint.key_file or key_file(config.folder, site)),
    )
    if reply.record_run:
        own = config.sites[site].data
        own_data = TokenFiles.open(Path(own).expanduser()).digest if own else None
        facts = OwnFacts(data, own_data, code_digest(), versions.model_dump())
        _accept(config, endpoint, identity, reply.record_manifest, facts)
    return identity


def _accept(
    config: RunConfig, endpoint: Endpoint, identity: Identity, manifest: str, facts: OwnFacts
) -> None:
    """Check the manifest that the coordinator has shown, and sign that the site takes part in it.

    Raises `JoinError` if it is not the one of this run; the site is out of the run then.
    """
    rank = RankName(site=identity.site, stage=0, shard=0)
    client = CoordinatorClient(endpoint.url, identity, Timeouts.derive(config.network), rank)
    try:
        client.record_state(accept(config, identity, manifest, facts))
    except (CoordinatorUnreachableError, SiteGoneError) as error:
        raise RetryLaterError(str(error)) from None
    except (CoordinatorError, RecordError) as error:
        with contextlib.suppress(DilocoxError):
            client.leave(f"does not accept the run's manifest: {error}", failed=True)
        raise JoinError(f"site {identity.site}: {error}") from None
    finally:
        client.close()


class SiteLine:
    """What a site itself, not one of its ranks, says to the coordinator.

    The site may be known as gone already, or the coordinator away: then nothing is said, and the
    end of its beats tells it all.
    """

    def __init__(
        self, config: RunConfig, site: str, endpoint: Endpoint, identity: Identity
    ) -> None:
        self.site = site
        self._url, self._identity = endpoint.url, identity
        timeouts = Timeouts.derive(config.network)
        # What cannot be said within a heartbeat is known by then.
        self._timeouts = replace(timeouts, coordinator=timeouts.heartbeat)

    @contextlib.contextmanager
    def _open(self) -> Iterator[CoordinatorClient]:
        # Opened when it is needed: until then this process forks.
        rank = RankName(site=self.site, stage=0, shard=0)
        client = CoordinatorClient(self._url, self._identity, self._timeouts, rank)
        try:
            yield client
        finally:
            client.close()

    def leave(self, reason: str, *, failed: bool) -> None:
        """The site is gone from now on."""
        with contextlib.suppress(DilocoxError), self._open() as client:
            client.leave(reason, failed=failed)

    def retire(self, reason: str) -> bool:
        """Ask to leave when the round is done; whether that could be said."""
        with contextlib.suppress(DilocoxError), self._open() as client:
            print_error(f"{client.retire(self.site, reason)} (again: at once)")
            return True
        return False

    def took_part(self) -> bool:
        """Whether this incarnation has been counted in; true if that cannot be told."""
        with contextlib.suppress(DilocoxError), self._open() as client:
            mine = next(item for item in client.status().sites if item.site == self.site)
            return mine.role in ("active", "finished")
        return True


def _show(news: Any) -> None:
    """Print what the leading rank has told since the last look."""
    while news is not None and not news.empty():
        site_log.say(news.get())


def _watch(line: SiteLine, ranks: list[BaseProcess], errors: Any, news: Any = None) -> Ended:
    """Wait until all ranks have ended well, or one has failed.

    A rank that says so has failed, though its process may hang behind that. Asked to go, by a
    signal, the site finishes its round first; asked again it goes at once.
    """
    heard = 0
    with listening() as asked:
        while True:
            alive = [rank for rank in ranks if rank.is_alive()]
            _show(news)
            failed = _failed(ranks)
            if asked.times > heard:
                heard = asked.times
                reason = f"asked to go (signal {asked.signal})"
                if heard > 1 or not line.retire(reason):
                    line.leave(reason, failed=False)
                    return Ended(130, reason)
            if failed or not errors.empty():
                # A rank that was killed cannot say so, its neighbours then say that a link broke;
                # else the rank that failed first is the one that knows why.
                time.sleep(0.2)
                failed = _failed(ranks)
                if any(rank.exitcode == STOPPED for rank in ranks):
                    return Ended(130 if heard else 0, "the run was stopped")
                killed = [rank for rank in ranks if (rank.exitcode or 0) < 0]
                said, permanent = (None, False) if killed or errors.empty() else errors.get()
                reason = said or _died((killed or failed)[0])
                took_part = line.took_part()
                line.leave(reason, failed=True)
                return Ended(130 if heard else 1, reason, permanent, took_part)
            if not alive:
                return Ended(130 if heard else 0)
            wait([rank.sentinel for rank in alive], timeout=0.5)


def _failed(ranks: list[BaseProcess]) -> list[BaseProcess]:
    return [rank for rank in ranks if rank.exitcode not in (None, 0)]


def _died(rank: BaseProcess) -> str:
    """What is said of a rank that could not say it itself."""
    line = f"{rank.name} {processes.why_ended(rank)}"
    if rank.exitcode == -signal.SIGKILL:
        # The system's own way to make room.
        return f"{line}; if nobody did that, memory has run out: {HOST_MEND}"
    return line


def exchange_address(config: RunConfig, site: str, url: str) -> str:
    """Interface name or IP address that this site's exchange binds to.

    The run file's, else this machine's address on the way to the coordinator.
    """
    chosen = config.sites[site].interface or config.network.interface
    if chosen:
        return chosen
    host, port = host_and_port(url)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RetryLaterError(
            f"coordinator {host}:{port}: no way there ({error.strerror}); check the address"
        ) from None
