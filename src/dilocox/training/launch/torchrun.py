"""A rank of a site that a launcher has started: torchrun, or Slurm's `srun`.

Before the ranks form their process group, they meet in a store. A wait in the store has no time
limit, but a collective has one, and preparing text may take hours. Until the ranks have met, this
module starts neither CUDA nor a thread, because a fork would break both.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.errors import DilocoxError, JoinError
from dilocox.training.builder import Hooks, RankPlace
from dilocox.training.launch import site_log
from dilocox.training.launch.rank import run_rank
from dilocox.training.launch.rank_job import STOPPED, RankJob
from dilocox.training.launch.site import SiteLine, enrol_site, exchange_address
from dilocox.training.launch.supervisor import Asked, listening, print_error
from dilocox.training.launch.torchrun_env import RankVariables
from dilocox.utils import processes
from dilocox.utils.chrome_trace import merge_rank, part_path

LOOK = 0.25
"""Seconds between two looks into the store. (PyTorch's own wait warns at each time-out.)"""
LAST_WORDS = 10.0
"""Seconds for which the first rank waits until the others have read why it gives up, or ends."""


@dataclass(frozen=True)
class Preparation:
    """The work of a site's ranks before the site enrols."""

    check: Callable[[], object]
    """Called by the first rank: checks the run and prepares the data."""
    fetch: Callable[[], object]
    """Called by all other ranks: fetches the files that each machine needs."""
    pay: Callable[[], object] = lambda: None
    """Called by the first rank, when every rank is prepared: pays what the site has to pay."""


def join_as_rank(
    config: RunConfig,
    site: str,
    endpoint: Endpoint,
    variables: RankVariables,
    prepare: Preparation,
    debug: bool,
    trace: bool = False,
    hooks: Hooks | None = None,
) -> int:
    """Take part in a run as one rank that a launcher has started, and return the exit code.

    When all ranks are prepared, the first rank pays, enrols the site, and gives the site's identity
    to the other ranks. The code is 130 if a signal has asked any rank of the site to end.

    Args:
        config: the run.
        site: name of the site.
        endpoint: address of the coordinator, and the site's token.
        variables: the launcher's variables for this rank.
        prepare: the work of this rank before the site enrols.
        debug: print tracebacks of errors.
        trace: record this rank's timeline.
        hooks: the user's own functions. None: dilocox's functions are used.

    Raises:
        JoinError: a rank of the site cannot go on. All ranks raise it.
    """
    if variables.world != config.site.ranks:
        raise JoinError(
            f"site {site}: {variables.world} ranks were started, but the run file asks for "
            f"{config.site.product} = {config.site.ranks}; start {config.site.ranks} ranks or "
            "change [site]; if no launcher started this process: unset RANK SLURM_PROCID"
        )
    variables.export()
    place = RankPlace.of_rank(site, variables.rank, config.site)
    trace = trace and place.exchanges
    stall = Timeouts.derive(config.network).stall
    with meeting_place(variables, timedelta(seconds=stall)) as store:
        tell_cores(store, variables.rank)
        text = agree(
            store,
            variables.rank,
            variables.world,
            prepare.check if variables.rank == 0 else prepare.fetch,
            lambda: _enrolled(config, site, endpoint, prepare),
            Seal(endpoint.tokens[site], site),
        )
        job = RankJob(
            config=config,
            place=place,
            url=endpoint.url,
            identity=Identity.from_text(text),
            hooks=hooks or Hooks(),
            address=exchange_address(config, site, endpoint.url),
            meeting=store,
            local_rank=variables.device_number,
            ranks_here=sharing_cores(store, variables.rank, variables.world),
            shared_folder=False,
            log_file=None,
            debug=debug,
            trace=part_path(config.folder, site, place.stage, place.shard) if trace else None,
            tell=site_log.say,
        )
        if place.leads:
            site_log.note_joined(config, site, endpoint.url.removeprefix("https://"))
        code, at_once, errors = _train(job, endpoint, SiteSignals(store, variables, stall))
    if trace:
        try:
            merge_rank(config.folder, site, place.stage, place.shard)
        except OSError as error:  # a missing timeline does not make the run fail
            print_error(f"the timeline was not written: {error}")
    if place.leads:
        site_log.note(config, site, "ended", code=code, reason="; ".join(errors))
    if code == 0 and place.leads:
        site_log.say(site_log.end(config, site))
    if at_once and dist.is_initialized():
        # The other ranks are ended by the launcher, or learn of the end from the coordinator.
        processes.exit_now(code)
    return code


def _enrolled(config: RunConfig, site: str, endpoint: Endpoint, prepare: Preparation) -> str:
    prepare.pay()
    return enrol_site(config, site, endpoint).to_text()


def _train(job: RankJob, endpoint: Endpoint, signals: SiteSignals) -> tuple[int, bool, list[str]]:
    """Train as the rank of `job` until its end.

    Returns the exit code, whether the process has to end at once, and the lines of errors. A rank
    that fails does not ask whether a signal has come to other ranks of the site.
    """
    errors: list[str] = []

    def failed(error: str, _permanent: bool) -> None:
        errors.append(error)
        print_error(error)

    line = SiteLine(job.config, job.place.site, endpoint, job.identity)
    going = Going(line, tell=signals.tell)
    with listening(asked=going):
        code = run_rank(job, failed)
    # After a request to leave, the rank's rounds are done and its checkpoint is written.
    asked = going.times > 0
    if code in (0, STOPPED):
        asked = signals.came(asked)
    return 130 if asked else 0 if code == STOPPED else code, code != 0, errors


class SiteSignals:
    """Lets all ranks of a site know whether a signal has asked any of them to end.

    A launcher that takes back one machine of a site signals only the ranks there. The ranks of the
    other machines leave as well, and must not end as if the run was over.

    The ranks meet in a store, which may end with the first rank. So the first rank waits at its end
    until the other ranks know.
    """

    def __init__(self, store: dist.Store | None, variables: RankVariables, patience: float) -> None:
        """Create the rank's view of the signals.

        `store`: store in which the ranks meet; None if there is only one rank. `patience`: seconds
        for which the first rank waits at most after a signal.
        """
        self._store, self._rank, self._patience = store, variables.rank, patience
        self._knowing = [f"knows/{other}" for other in range(variables.world)]

    def tell(self) -> None:
        """Tell the other ranks that a signal has asked this rank to end."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set("signalled", "+")
                self._store.set(self._knowing[self._rank], "+")

    def came(self, here: bool) -> bool:
        """Return whether a signal has asked any rank of the site to end. Call it at the end.

        `here`: whether a signal has asked this rank. If the store is gone, the first rank has ended
        and knew of no signal.
        """
        store, found = self._store, here
        if store is None:
            return found
        if here:
            self.tell()
        with contextlib.suppress(RuntimeError):
            found = found or store.check(["signalled"])
            store.set(self._knowing[self._rank], "+")
            # Ranks of other stages may need minutes more for the exchanges of their last round.
            end = time.monotonic() + (self._patience if found else LAST_WORDS)
            while self._rank == 0 and not store.check(self._knowing) and time.monotonic() < end:
                time.sleep(LOOK)
        return found


class Going(Asked):
    """Handles the launcher's SIGTERM: the site leaves the run as `dilocox join` does.

    A launcher sends SIGTERM to all ranks of a machine, and kills them later. Each rank that gets
    the signal tells the coordinator, since the leading rank may be on another machine. The rank
    trains on until its rounds are done. If its site is the last active site, the run stops with a
    checkpoint.
    At a second signal the rank ends at once.
    """

    def __init__(
        self,
        line: SiteLine,
        end: Callable[[int], object] = processes.exit_now,
        tell: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> None:
        """Create the handler. `end` ends the process; `tell` is called at the first signal."""
        super().__init__(**options)
        self._line, self._end, self._tell = line, end, tell

    def __call__(self, number: int, frame: object) -> None:
        """Handle the signal. A thread asks the coordinator, because training must not wait."""
        before = self.times
        super().__call__(number, frame)
        if self.times > before:
            again = self.times > 1
            if not again:
                # In a thread of its own, since the store may be busy for long at the rank's start.
                threading.Thread(target=self._tell, name="signalled", daemon=True).start()
            threading.Thread(target=self.ask, args=(again,), name="going", daemon=True).start()

    def ask(self, again: bool) -> None:
        """Ask the coordinator to let the site leave after its round.

        With `again`, or if the coordinator does not reply, end this process at once.
        """
        reason = f"asked to go (signal {self.signal})"
        if again or not self._line.retire(reason):
            self._line.leave(reason, failed=False)
            self._end(130)


@contextlib.contextmanager
def meeting_place(variables: RankVariables, patience: timedelta) -> Iterator[dist.Store | None]:
    """Context with the store in which all ranks of the site meet. None if there is only one rank.

    torchrun has such a store. Otherwise the first rank serves one, in a child process that ends
    with the rank. Raises `JoinError` if the store cannot be reached within `patience`.
    """
    if variables.world == 1:
        yield None
        return
    host, port = variables.master_address, int(variables.master_port)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    served = []
    try:
        if variables.rank == 0 and not agent:
            ours, theirs = processes.CONTEXT.Pipe(duplex=False)
            served.append(processes.start(_serve, host, port, theirs, name="meeting"))
            theirs.close()
            with contextlib.suppress(EOFError):
                problem = ours.recv()
                if problem:
                    raise JoinError(f"{host}:{port}: the ranks cannot meet there ({problem})")
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=patience)
        except RuntimeError as error:
            raise JoinError(
                f"{host}:{port}: the first rank cannot be reached ({str(error).splitlines()[0]}); "
                "set MASTER_ADDR and MASTER_PORT to an address at which all ranks reach it"
            ) from None
        # The store of torchrun's agent outlives restarted ranks, so each attempt has its prefix.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        yield dist.PrefixStore(f"dilocox/{attempt}", store)
    finally:
        processes.end(served, grace=0.0)


def _serve(host: str, port: int, pipe: Connection) -> None:
    try:
        # The store lives as long as this process, which ends with the first rank.
        _store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        pipe.send(str(error).splitlines()[0])
        return
    pipe.send("")
    while True:
        signal.pause()


def tell_cores(
    store: dist.Store | None, rank: int, cores: Collection[int] | None = None, host: str = ""
) -> None:
    """Tell the other ranks of the site on which cores this rank may run.

    Args:
        store: store in which the ranks meet. None if there is only one rank.
        rank: number of this rank within the site.
        cores: numbers of the cores. None: as the system says.
        host: name of this machine; empty: as the system says.
    """
    if cores is None:
        known = hasattr(os, "sched_getaffinity")
        cores = os.sched_getaffinity(0) if known else range(os.cpu_count() or 1)
    if store is not None:
        said = json.dumps([host or socket.gethostname(), sorted(cores)])
        store.set(f"cores/{rank}", f"+{said}")


def sharing_cores(store: dist.Store | None, rank: int, world: int) -> int:
    """Return how many ranks of this machine may run on a core of this rank, itself included.

    A launcher may bind each rank to cores of its own, as Slurm does, or let all ranks of a machine
    share its cores, as torchrun does. Waits until all `world` ranks have called `tell_cores`.
    """
    if store is None:
        return 1
    told = [json.loads(_hear(store, f"cores/{other}")) for other in range(world)]
    host, cores = told[rank]
    return sum(name == host and not set(cores).isdisjoint(other) for name, other in told)


def agree(
    store: dist.Store | None,
    rank: int,
    world: int,
    prepare: Callable[[], object],
    enrol: Callable[[], str],
    seal: Seal,
) -> str:
    """Return the result of `enrol` at all ranks of the site.

    Every rank calls `prepare`. After all of them have, the first rank calls `enrol`. The result
    holds private keys, and every machine in the site's network can read the store. So the store
    only holds the result encrypted by `seal`, until every rank has read it.

    Args:
        store: store in which the ranks meet. None if there is only one rank.
        rank: number of this rank within the site.
        world: number of the site's ranks.

    Raises:
        JoinError: a rank cannot go on. All ranks raise it.
    """
    if store is None:
        prepare()
        return enrol()
    try:
        prepare()
        if rank == 0:
            for other in range(1, world):
                _hear(store, f"prepared/{other}")
            identity = enrol()
            said = f"+{seal.close(identity)}"
        else:
            said = "+"
    except DilocoxError as error:
        said = f"-{error}"
    store.set("enrolled" if rank == 0 else f"prepared/{rank}", said)
    if rank > 0:
        try:
            return seal.open(_hear(store, "enrolled"))
        finally:
            with contextlib.suppress(RuntimeError):
                if store.add("heard", 1) == world - 1:
                    store.delete_key("enrolled")
    if said.startswith("-"):
        end = time.monotonic() + LAST_WORDS
        while store.add("heard", 0) < world - 1 and time.monotonic() < end:
            time.sleep(LOOK)
        raise JoinError(said[1:])
    return identity


class Seal:
    """Encrypts by AES-256-GCM, with a key derived by HKDF-SHA256 from the join token.

    Every rank of the site has the join token.
    """

    def __init__(self, token: str, site: str) -> None:
        kdf = HKDF(hashes.SHA256(), length=32, salt=None, info=b"dilocox: identity of a site")
        self._cipher = AESGCM(kdf.derive(token.encode()))
        self._site = site.encode()

    def close(self, text: str) -> str:
        """Return `text` encrypted, as hex. Only this site's ranks can read it, or make another."""
        nonce = os.urandom(12)
        return (nonce + self._cipher.encrypt(nonce, text.encode(), self._site)).hex()

    def open(self, sealed: str) -> str:
        """Return the text that `close` encrypted.

        Raises `JoinError` for a text that was not encrypted with this site's join token.
        """
        try:
            content = bytes.fromhex(sealed)
            return self._cipher.decrypt(content[:12], content[12:], self._site).decode()
        except (InvalidTag, ValueError):
            raise JoinError(
                "the site's identity was not sealed with this site's join token; give all ranks "
                "the same token and the same site name"
            ) from None


def _hear(store: dist.Store, key: str) -> str:
    """Wait without a limit for a rank's message under `key`, and return it.

    Raises `JoinError` if the message says why the rank cannot go on, or if the store is gone.
    """
    while True:
        try:
            if not store.check([key]):
                time.sleep(LOOK)
                continue
            said = store.get(key).decode()
        except RuntimeError as error:
            raise JoinError(
                f"the first rank of this site is gone ({str(error).splitlines()[0]}); look at "
                "that rank's output for the reason"
            ) from None
        if said.startswith("-"):
            raise JoinError(said[1:])
        return said[1:]
