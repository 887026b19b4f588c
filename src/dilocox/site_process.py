"""One site of a run: it enrols, starts its ranks and watches over them."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dilocox import processes
from dilocox.assembly import Hooks, Place
from dilocox.config import RunConfig
from dilocox.data import TokenFiles
from dilocox.errors import DilocoxError, JoinError
from dilocox.launcher_env import RankVariables
from dilocox.outer.coordinator.client import CoordinatorClient
from dilocox.outer.coordinator.identity import Identity
from dilocox.outer.coordinator.joining import enrol
from dilocox.outer.coordinator.messages import Rank as RankName
from dilocox.outer.coordinator.serving import Endpoint
from dilocox.outer.coordinator.timeouts import Timeouts
from dilocox.outer.coordinator.transport import host_and_port
from dilocox.outer.sockets import check_congestion
from dilocox.outer.tunnel import check_ports
from dilocox.rank_process import RankJob, run_rank
from dilocox.site import resolve_device, start_site_group
from dilocox.trace_file import merge_rank, part_path


def run_site(
    config: RunConfig,
    site: str,
    endpoint: Endpoint,
    hooks: Hooks,
    debug: bool,
    folder: Path,
    shared_folder: bool,
    trace: bool = False,
) -> int:
    """Enrol a site, start its ranks and watch over them; exit code.

    A rank that dies takes its site down: the others are told at once, and the ranks ended.
    `trace`: every rank records its timeline below `folder` (see `trace_file.part_path`).
    """
    address = exchange_address(config, site, endpoint.url)
    check_ports(site, config.sites[site], config.site.ranks, address)
    check_congestion(config.network.congestion)
    identity = _enrol(config, site, endpoint)
    errors = processes.CONTEXT.SimpleQueue()
    ranks_here = config.site.ranks * (len(config.sites) if shared_folder else 1)
    ranks: list[BaseProcess] = []
    meeting = tempfile.mktemp(prefix=f"dilocox-{site}-")  # noqa: S306 - FileStore makes it
    try:
        for number in range(config.site.ranks):
            stage, shard = divmod(number, config.site.shards)
            job = RankJob(
                config=config,
                place=Place(site, stage, shard),
                url=endpoint.url,
                identity=identity,
                hooks=hooks,
                address=address,
                meeting=meeting,
                local_rank=number,
                ranks_here=ranks_here,
                shared_folder=shared_folder,
                log_file=folder / "logs" / f"{site}-stage{stage}-shard{shard}.log",
                debug=debug,
                trace=part_path(folder, site, stage, shard) if trace else None,
            )
            name = f"{site}-stage{stage}-shard{shard}"
            ranks.append(processes.start(_rank_in_child, job, errors.put, name=name))
        return _supervise(config, site, endpoint, identity, ranks, errors)
    finally:
        processes.end(ranks, grace=0.0)
        Path(meeting).unlink(missing_ok=True)


def _rank_in_child(job: RankJob, errors: Callable[[str], None]) -> None:
    sys.exit(run_rank(job, errors))


def _enrol(config: RunConfig, site: str, endpoint: Endpoint) -> Identity:
    timeouts = Timeouts.derive(config.network)
    identity, _ = enrol(
        endpoint.url,
        endpoint.token,
        site=site,
        run_digest=config.digest(),
        stages=config.site.stages,
        shards=config.site.shards,
        data_digest=TokenFiles.open(config.data_folder).digest,
        timeout=timeouts.link,
    )
    return identity


def _supervise(
    config: RunConfig,
    site: str,
    endpoint: Endpoint,
    identity: Identity,
    ranks: list[BaseProcess],
    errors: Any,
) -> int:
    stop = {"reason": ""}

    def asked_to_go(number: int, _frame: object) -> None:
        stop["reason"] = f"asked to go (signal {number})"

    # A terminal's Ctrl-C reaches every process of a run. Where the parent decides what it means it
    # is ignored here: the site must not leave while the run stops with a checkpoint.
    numbers = (signal.SIGTERM, signal.SIGINT)
    old = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    for number in old:
        signal.signal(number, asked_to_go)
    try:
        while True:
            alive = [rank for rank in ranks if rank.is_alive()]
            failed = [rank for rank in ranks if rank.exitcode not in (None, 0)]
            if stop["reason"]:
                _leave(config, site, endpoint, identity, stop["reason"], failed=False)
                return 130
            if failed:
                # A rank that was killed cannot say so, its neighbours then say that a link broke;
                # else the rank that failed first is the one that knows why.
                time.sleep(0.2)
                killed = [rank for rank in ranks if (rank.exitcode or 0) < 0]
                said = None if killed or errors.empty() else errors.get()
                first = (killed or failed)[0]
                reason = said or f"{first.name} {processes.why_ended(first)}"
                _leave(config, site, endpoint, identity, reason, failed=True)
                print(f"dilocox: {reason}", file=sys.stderr)
                return 1
            if not alive:
                return 0
            wait([rank.sentinel for rank in alive], timeout=0.5)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _leave(
    config: RunConfig,
    site: str,
    endpoint: Endpoint,
    identity: Identity,
    reason: str,
    failed: bool,
) -> None:
    timeouts = Timeouts.derive(config.network)
    client = CoordinatorClient(
        endpoint.url, identity, timeouts, RankName(site=site, stage=0, shard=0)
    )
    # The site may be known as gone already, or the coordinator away: beats end in either case.
    with contextlib.suppress(DilocoxError):
        client.leave(reason, failed=failed)
    client.close()


def join_as_rank(
    config: RunConfig,
    site: str,
    endpoint: Endpoint,
    variables: RankVariables,
    prepare: Callable[[], object],
    debug: bool,
    trace: bool = False,
) -> int:
    """Take part as one rank that a launcher has started; exit code.

    The first rank prepares the data, enrols the site and tells the others who they are.
    """
    if variables.world != config.site.ranks:
        raise JoinError(
            f"site {site}: {variables.world} ranks were started, the run file asks for stages x "
            f"shards = {config.site.ranks}; start {config.site.ranks} or change [site]"
        )
    variables.export()
    timeouts = Timeouts.derive(config.network)
    stage, shard = divmod(variables.rank, config.site.shards)
    device = resolve_device(config.site, variables.local_rank)
    mesh = start_site_group(
        config.site.stages, config.site.shards, device, timedelta(seconds=timeouts.stall)
    )
    said: list[str] = []
    if variables.rank == 0:
        try:
            prepare()
            said = [_enrol(config, site, endpoint).to_text()]
        except DilocoxError as error:
            said = ["", str(error)]
    said = mesh.gather_names(said)[0]
    if len(said) > 1:
        raise JoinError(said[1])
    job = RankJob(
        config=config,
        place=Place(site, stage, shard),
        url=endpoint.url,
        identity=Identity.from_text(said[0]),
        hooks=Hooks(),
        address=exchange_address(config, site, endpoint.url),
        meeting=None,
        local_rank=variables.local_rank,
        ranks_here=variables.local_world,
        shared_folder=False,
        log_file=None,
        debug=debug,
        trace=part_path(config.folder, site, stage, shard) if trace else None,
    )
    code = run_rank(job, lambda line: print(f"dilocox: {line}", file=sys.stderr))
    if trace:
        merge_rank(config.folder, site, stage, shard)
    return code


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
        raise JoinError(
            f"coordinator {host}:{port}: no way there ({error.strerror}); check the address"
        ) from None
