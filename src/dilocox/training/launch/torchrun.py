"""A rank of a site that somebody else has started: torchrun, or Slurm's `srun`.

Before the ranks form their process group they meet in a store, where one may wait for another for
as long as it takes: preparing text takes hours, and collectives have a time limit. Until then
nothing is started here that a fork would harm, neither CUDA nor a thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
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
from dilocox.training.launch.rank import RankJob, run_rank
from dilocox.training.launch.site import SiteLine, enrol_site, exchange_address
from dilocox.training.launch.supervisor import Asked, listening, print_error
from dilocox.training.launch.torchrun_env import RankVariables
from dilocox.utils import processes
from dilocox.utils.chrome_trace import merge_rank, part_path

LOOK = 0.25
"""Seconds from one look into the store to the next. (PyTorch's own wait warns whenever it ends.)"""
LAST_WORDS = 10.0
"""Seconds in which the others may hear why the first rank gives up."""


def join_as_rank(
    config: RunConfig,
    site: str,
    endpoint: Endpoint,
    variables: RankVariables,
    check: Callable[[], object],
    fetch: Callable[[], object],
    debug: bool,
    trace: bool = False,
    hooks: Hooks | None = None,
) -> int:
    """Take part as one rank that a launcher has started; exit code.

    The first rank does `check` (it refuses what cannot run, and prepares the data), the others
    `fetch` (what each machine needs). When all are through, the first one enrols the site and
    tells the others who they are. Raises `JoinError` at all of them if one cannot go on.
    """
    if variables.world != config.site.ranks:
        raise JoinError(
            f"site {site}: {variables.world} ranks were started, the run file asks for "
            f"{config.site.product} = {config.site.ranks}; start {config.site.ranks} or change "
            "[site]; if no launcher started this: unset RANK SLURM_PROCID"
        )
    variables.export()
    place = RankPlace.of_rank(site, variables.rank, config.site)
    patience = timedelta(seconds=Timeouts.derive(config.network).stall)
    with meeting_place(variables, patience) as store:
        text = agree(
            store,
            variables.rank,
            variables.world,
            check if variables.rank == 0 else fetch,
            lambda: enrol_site(config, site, endpoint).to_text(),
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
            ranks_here=variables.local_world,
            shared_folder=False,
            log_file=None,
            debug=debug,
            trace=part_path(config.folder, site, place.stage, place.shard)
            if trace and place.exchanges
            else None,
            tell=site_log.say,
        )
        if place.leads:
            site_log.note_joined(config, site, endpoint.url.removeprefix("https://"))
        errors: list[str] = []

        def failed(line: str, _permanent: bool) -> None:
            errors.append(line)
            print_error(line)

        going = Going(SiteLine(config, site, endpoint, job.identity))
        with listening(asked=going):
            code = run_rank(job, failed)
        # Its rounds are done, and its part of a checkpoint is written.
        code = 130 if going.times else code
    if trace and place.exchanges:
        try:
            merge_rank(config.folder, site, place.stage, place.shard)
        except OSError as error:  # not worth a run's failure
            print_error(f"the timeline was not written: {error}")
    if place.leads:
        site_log.note(config, site, "ended", code=code, reason="; ".join(errors))
    if code == 0 and place.leads:
        site_log.say(site_log.end(config, site))
    if code and dist.is_initialized():
        # The others end by the launcher, or by what the coordinator tells them.
        processes.exit_now(code)
    return code


class Going(Asked):
    """Hears the launcher's SIGTERM, and has the site leave the run as `dilocox join` does.

    A launcher tells all ranks of a machine, and kills them later; the run is told by each rank
    that hears it, since the leading one may be on another machine. The rank trains on: it ends
    when its rounds are done, or with a checkpoint where its site is the last. Asked again, it ends
    at once.
    """

    def __init__(
        self, line: SiteLine, end: Callable[[int], object] = processes.exit_now, **options: Any
    ) -> None:
        super().__init__(**options)
        self._line, self._end = line, end

    def __call__(self, number: int, frame: object) -> None:
        """The signal's handler. It must not wait for the coordinator: training goes on."""
        before = self.times
        super().__call__(number, frame)
        if self.times > before:
            again = self.times > 1
            threading.Thread(target=self.ask, args=(again,), name="going", daemon=True).start()

    def ask(self, again: bool) -> None:
        """Ask the coordinator to let the site go; end this process if it cannot or need not."""
        reason = f"asked to go (signal {self.signal})"
        if again or not self._line.retire(reason):
            self._line.leave(reason, failed=False)
            self._end(130)


@contextlib.contextmanager
def meeting_place(variables: RankVariables, patience: timedelta) -> Iterator[dist.Store | None]:
    """The store of all ranks that were started together; none for one rank alone.

    torchrun has one. Otherwise the first rank serves it, in a process of its own that ends with
    it. Raises `JoinError` if there is no way there within `patience`.
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
                f"{host}:{port}: no way to the first rank ({str(error).splitlines()[0]}); set "
                "MASTER_ADDR and MASTER_PORT to where all ranks reach it"
            ) from None
        # An agent's store outlives the ranks that it starts again.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        yield dist.PrefixStore(f"dilocox/{attempt}", store)
    finally:
        processes.end(served, grace=0.0)


def _serve(host: str, port: int, pipe: Connection) -> None:
    try:
        # As long as this process lives, which is as long as the first rank does.
        _store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        pipe.send(str(error).splitlines()[0])
        return
    pipe.send("")
    while True:
        signal.pause()


def agree(
    store: dist.Store | None,
    rank: int,
    world: int,
    prepare: Callable[[], object],
    enrol: Callable[[], str],
    seal: Seal,
) -> str:
    """What `enrol` gives, at all ranks: the first one calls it once all are through `prepare`.

    What `enrol` gives holds private keys, and everybody in the site's network can read the store:
    it lies there under `seal` only, until every rank has read it. Raises `JoinError` at every rank
    if one of them cannot go on.
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
    """AES-256-GCM under a key made from the join token (HKDF-SHA256), which every rank has."""

    def __init__(self, token: str, site: str) -> None:
        kdf = HKDF(hashes.SHA256(), length=32, salt=None, info=b"dilocox: identity of a site")
        self._cipher = AESGCM(kdf.derive(token.encode()))
        self._site = site.encode()

    def close(self, text: str) -> str:
        """`text` as hex that only this site's ranks can read, and nobody else can make."""
        nonce = os.urandom(12)
        return (nonce + self._cipher.encrypt(nonce, text.encode(), self._site)).hex()

    def open(self, sealed: str) -> str:
        """Inverse of `close`. Raises `JoinError` for a text of somebody else."""
        try:
            content = bytes.fromhex(sealed)
            return self._cipher.decrypt(content[:12], content[12:], self._site).decode()
        except (InvalidTag, ValueError):
            raise JoinError(
                "the site's identity was not sealed with this site's join token; give all ranks "
                "the same token and the same site name"
            ) from None


def _hear(store: dist.Store, key: str) -> str:
    """What a rank has said under `key`, whenever it does. Raises `JoinError` if that is why it
    cannot go on, or if the store is gone."""
    while True:
        try:
            if not store.check([key]):
                time.sleep(LOOK)
                continue
            said = store.get(key).decode()
        except RuntimeError as error:
            raise JoinError(
                f"the first rank of this site is gone ({str(error).splitlines()[0]}); see what it "
                "said"
            ) from None
        if said.startswith("-"):
            raise JoinError(said[1:])
        return said[1:]
