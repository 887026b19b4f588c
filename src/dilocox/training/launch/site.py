"""One site of a run: enrols with the coordinator, starts its ranks and supervises them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dilocox.config.adapter import adapter_packages
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.client.enrolment import Applicant, apply, enrol, installed_versions
from dilocox.coordinator.client.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    SiteGoneError,
)
from dilocox.coordinator.client.stake_file import read_stake_proof
from dilocox.coordinator.client.transport import addresses_of
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.messages import RankId as RankName
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.record_keys import RecordKey, key_file
from dilocox.data import TokenFiles
from dilocox.errors import DilocoxError, JoinError, RecordError, RetryLaterError
from dilocox.models.prefetch import digest_of_base
from dilocox.record.log.acceptance import OwnFacts, accept
from dilocox.record.log.manifest import code_digest
from dilocox.training.builder import Hooks, RankPlace
from dilocox.training.launch import site_log
from dilocox.training.launch.coordinator_check import ENDPOINT
from dilocox.training.launch.rank import run_rank
from dilocox.training.launch.rank_job import STOPPED, RankJob
from dilocox.training.launch.supervisor import Ended, keep_in_run, listening, print_error
from dilocox.training.one_folder import living_beside
from dilocox.training.rank_errors import HOST_MEND
from dilocox.training.site_text import own_token_files
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
    """Enrol a site, start its ranks and supervise them to their end. Returns how the site ended.

    If a rank dies, the whole site leaves the run: the coordinator is told at once, and the other
    ranks are ended.

    Args:
        endpoint: address of the coordinator, and this site's join token.
        hooks: the user's own functions.
        debug: write more to the logs of the ranks.
        folder: run folder, for logs and timelines.
        shared_folder: all sites of the run are on this machine and write to one run folder.
            Otherwise those sites share its cores and GPUs that train here and have joined from the
            same folder.
        trace: record the timeline of every rank (see `chrome_trace.part_path`).

    Raises:
        JoinError: the coordinator refuses the site or cannot be reached.
        ConfigError: ports for exchanges cannot be used.
    """
    # Sites on one machine share its GPUs: a site's GPUs follow those of the sites before it. Beside
    # a coordinator further sites may join from this folder later.
    several = shared_folder or (config.folder / "coordinator" / ENDPOINT).exists()
    first = list(config.sites).index(site) * config.site.ranks if several else 0
    address = check_site(config, site, endpoint)
    identity = enrol_site(config, site, endpoint)
    errors = processes.CONTEXT.SimpleQueue()
    # Without an operator identity this is `dilocox join`: no other process here shows the run.
    news = None if endpoint.operator else processes.CONTEXT.SimpleQueue()
    if news is not None:
        where = endpoint.url.removeprefix("https://")
        site_log.say(site_log.joined(site, config.run.name, where))
        site_log.note_joined(config, site, where)
    beside = [] if shared_folder else living_beside(config.folder, config.sites, site)
    ranks_here = config.site.ranks * (len(config.sites) if shared_folder else 1 + len(beside))
    ranks: list[BaseProcess] = []
    # Only this user can enter the folder, so no other user can create the ranks' meeting file.
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
) -> Ended:
    """Call `run_site`, and again after every crash while the run lasts. Returns how it ended.

    The arguments and the errors are those of `run_site`. The reason of the end is not printed.
    """
    ended = keep_in_run(
        site,
        lambda: run_site(config, site, endpoint, hooks, debug, folder, shared_folder, trace),
        Timeouts.derive(config.network),
        print_error,
    )
    if not endpoint.operator:
        site_log.note(config, site, "ended", code=ended.code, reason=ended.reason)
    return ended


def _rank_in_child(job: RankJob, errors: Any) -> None:
    code = run_rank(job, lambda line, permanent: errors.put((line, permanent)))
    if code:
        processes.exit_now(code)
    sys.exit(code)


def check_site(config: RunConfig, site: str, endpoint: Endpoint) -> str:
    """Check this machine's addresses and ports, and return `exchange_address`.

    Raises `ConfigError` for ports that cannot be used, and `RetryLaterError` without a route.
    """
    address = exchange_address(config, site, endpoint.url)
    check_ports(site, config.sites[site], config.site.exchanging_ranks, address)
    check_congestion(config.network.congestion)
    return address


def pay_to_join(
    config: RunConfig, site: str, endpoint: Endpoint, deposit: Callable[[], object] | None
) -> None:
    """Call `deposit`, once the coordinator has said that it would admit the site when it has paid.

    Without a deposit nothing is asked. Raises `JoinError` if the coordinator would refuse the site,
    and the errors of `deposit`.
    """
    if deposit is None:
        return
    token, timeouts = endpoint.tokens[site], Timeouts.derive(config.network)
    key = RecordKey.kept(own_key_file(config, site, endpoint))
    apply(endpoint.url, token, _applicant(config, site), timeouts=timeouts, record_key=key)
    deposit()


def own_key_file(config: RunConfig, site: str, endpoint: Endpoint) -> Path:
    """Return the path of the file in which the site keeps its key."""
    return endpoint.key_file or key_file(config.folder, site)


def enrol_site(
    config: RunConfig, site: str, endpoint: Endpoint, own_model: str | None = None
) -> Identity:
    """Enrol `site` with the coordinator, and return its identity.

    The site's ranks must send heartbeats soon after that. The site names the digest of the token
    files that all sites share, even if it has text of its own. If the run has adapters, the site
    also names the digest of the base model. `own_model`: digest of a model of a loop of the user's
    own, which the site names instead. Raises `JoinError` if the coordinator refuses the site.
    """
    own_key = own_key_file(config, site, endpoint)
    record_key = RecordKey.kept(own_key)
    by_stake = config.settlement is not None and config.settlement.admission == "stake"
    stake = read_stake_proof(own_key, record_key.public) if by_stake else None
    applicant = replace(_applicant(config, site, own_model), stake=stake)
    identity, reply = enrol(
        endpoint.url,
        endpoint.tokens[site],
        applicant,
        timeouts=Timeouts.derive(config.network),
        record_key=record_key,
        say=print_error,
    )
    if reply.record_run:
        own, versions = own_token_files(config, site), applicant.versions
        assert versions is not None
        facts = OwnFacts(
            applicant.data_digest,
            None if own is None else own.digest,
            code_digest(),
            versions.named(),
            applicant.base_digest,
        )
        _accept(config, endpoint, identity, reply.record_manifest, facts)
    return identity


def _applicant(config: RunConfig, site: str, own_model: str | None = None) -> Applicant:
    """Return the site as it describes itself to the coordinator, without a stake."""
    return Applicant(
        site,
        config.digest(),
        config.site.stages,
        config.site.shards,
        installed_versions(adapter_packages(config.adapter)),
        None if config.data.own else TokenFiles.open(config.data_folder).digest,
        own_model or digest_of_base(config),
        config.run.code or None,
    )


def _accept(
    config: RunConfig, endpoint: Endpoint, identity: Identity, manifest: str, facts: OwnFacts
) -> None:
    """Check the run's manifest that the coordinator has sent, and sign it for this site.

    Raises `JoinError` if it is not the manifest of this run. The site has then left the run.
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
    """Sends requests of the site's own process, which is no rank, to the coordinator.

    If the coordinator cannot be reached, or already counts the site as gone, a request is dropped.
    The coordinator then learns of the site's end by its missing heartbeats.
    """

    def __init__(
        self, config: RunConfig, site: str, endpoint: Endpoint, identity: Identity
    ) -> None:
        self.site = site
        self._url, self._identity = endpoint.url, identity
        timeouts = Timeouts.derive(config.network)
        # After the heartbeat time-out the coordinator knows anyway, so no request takes longer.
        self._timeouts = replace(timeouts, coordinator=timeouts.heartbeat)

    @contextlib.contextmanager
    def _open(self) -> Iterator[CoordinatorClient]:
        # Opened only when needed, because this process still forks until then.
        rank = RankName(site=self.site, stage=0, shard=0)
        client = CoordinatorClient(self._url, self._identity, self._timeouts, rank)
        try:
            yield client
        finally:
            client.close()

    def leave(self, reason: str, *, failed: bool) -> None:
        """Tell the coordinator that the site leaves the run at once. `failed`: by a failure."""
        with contextlib.suppress(DilocoxError), self._open() as client:
            client.leave(reason, failed=failed)

    def retire(self, reason: str) -> bool:
        """Ask the coordinator to let the site leave after its round. Returns whether it replied."""
        said = self.ask_to_leave(reason)
        if said:
            print_error(f"{said} (again: at once)")
        return bool(said)

    def ask_to_leave(self, reason: str) -> str:
        """Do what `retire` does, and return what happens to the site; empty without a reply."""
        with contextlib.suppress(DilocoxError), self._open() as client:
            return client.retire(self.site, reason)
        return ""

    def took_part(self) -> bool:
        """Return whether this incarnation of the site has taken part; True if it is not known."""
        with contextlib.suppress(DilocoxError), self._open() as client:
            mine = next(item for item in client.status().sites if item.site == self.site)
            return mine.role in ("active", "finished")
        return True


def _show(news: Any) -> None:
    """Print the lines that the leading rank has sent since the last call."""
    while news is not None and not news.empty():
        site_log.say(news.get())


def _watch(line: SiteLine, ranks: list[BaseProcess], errors: Any, news: Any = None) -> Ended:
    """Wait until all ranks have ended without an error, or one rank has failed.

    A rank that reports an error has failed, even if its process hangs after that. At the first
    signal the site finishes its round and leaves; at the second signal it leaves at once.
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
                # A killed rank reports nothing, and its neighbours report a broken link. In all
                # other cases the rank that failed first knows the reason.
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
    """Return why the process of `rank` ended, if the rank itself reported no reason."""
    line = f"{rank.name} {processes.why_ended(rank)}"
    if rank.exitcode == -signal.SIGKILL:
        # Linux kills processes with SIGKILL if memory runs out.
        return f"{line}; if nobody did that, memory has run out: {HOST_MEND}"
    return line


def exchange_address(config: RunConfig, site: str, url: str) -> str:
    """Return the interface name or IP address that this site's exchange binds to.

    It is the one in the run file, otherwise this machine's address on the route to the
    coordinator's first address. Raises `RetryLaterError` if there is no route.
    """
    chosen = config.sites[site].interface or config.network.interface
    if chosen:
        return chosen
    host, port = addresses_of(url)[0]
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RetryLaterError(
            f"coordinator {host}:{port}: cannot be reached ({error.strerror}); check the address"
        ) from None
