"""Starts a run: all sites on this machine, or the coordinator here and one site elsewhere.

Both ways are the same: a coordinator, and sites that join it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from dilocox import preflight, processes
from dilocox.assembly import Hooks, Place
from dilocox.config import RunConfig
from dilocox.data import TokenFiles
from dilocox.data import prepare as prepare_token_files
from dilocox.display import Display
from dilocox.errors import DilocoxError, JoinError, TrainingError
from dilocox.launcher_env import RankVariables, rank_variables
from dilocox.outer.coordinator.client import CoordinatorClient
from dilocox.outer.coordinator.identity import Identity
from dilocox.outer.coordinator.joining import enrol
from dilocox.outer.coordinator.messages import Rank as RankName
from dilocox.outer.coordinator.serving import Endpoint, serve
from dilocox.outer.coordinator.timeouts import Timeouts
from dilocox.outer.coordinator.transport import host_and_port
from dilocox.rank_process import RankJob, run_rank
from dilocox.recorder import Record, Recorder
from dilocox.site import start_site_group
from dilocox.site.machine import resolve_device


ENDPOINT = "endpoint.json"
"""In the coordinator's folder, readable by its owner: address, join token, operator's identity."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    phase: str
    """`finished`, `stopped` (it can be resumed) or `failed`."""
    reason: str
    summary: Record
    folder: Path

    @property
    def finished(self) -> bool:
        """The run is complete."""
        return self.phase == "finished"

    @property
    def failed(self) -> bool:
        """The run could not go on."""
        return self.phase == "failed"

    @property
    def stopped(self) -> bool:
        """The run was stopped with a checkpoint."""
        return self.phase == "stopped"


def prepare_data(config: RunConfig, display: Display | None = None) -> TokenFiles:
    """The run's token files, made in a child process if they are not there yet."""

    def progress(step: str, share: float) -> None:
        if display is not None:
            display.step(step, share)

    folder = processes.call_in_child(_prepare, config, on_progress=progress)
    if display is not None:
        display.step_done()
    return TokenFiles.open(folder)


def _prepare(config: RunConfig, progress: Callable[[str, float], None]) -> Path:
    return prepare_token_files(config.data, config.data_folder, config.run.seed, progress).folder


def train_here(
    config: RunConfig, hooks: Hooks, *, resume: bool, overwrite: bool, debug: bool
) -> Result:
    """Train a run with all of its sites on this machine.

    Ctrl-C stops the run at a slot end with a checkpoint; a second one ends it at once.
    """
    torch.set_num_threads(1)  # before forking: no thread pool that a child would miss
    display = Display(config)
    folder = preflight.claim_folder(config, resume, overwrite)
    if resume:
        _refuse_finished(folder)
    files = prepare_data(config, display)
    preflight.check_run(config, files.vocabulary_size, sites_here=len(config.sites))
    display.line(preflight.headline(config, files))
    (folder / "run.toml").write_text(config.to_toml(), encoding="utf-8")
    ours, theirs = processes.CONTEXT.Pipe(duplex=False)
    coordinator = processes.start(
        _coordinate_in_child, config, folder, resume, theirs, name="coordinator"
    )
    theirs.close()
    sites: dict[str, BaseProcess] = {}
    try:
        endpoint = _first_word(ours, coordinator, display)
        for site in config.sites:
            sites[site] = processes.start(
                _site_in_child, config, site, endpoint, hooks, debug, folder, name=site
            )
        display.start()
        end = _watch(ours, coordinator, sites, endpoint, config, display)
    finally:
        display.stop()
        ours.close()
        processes.end([*sites.values(), coordinator], grace=10.0)
    display.summary(end["summary"])
    result = Result(end["phase"], end["reason"], end["summary"], folder)
    if result.failed:
        raise TrainingError(f"run {config.run.name} failed: {end['reason']}")
    _last_words(config, result, display)
    return result


def _last_words(config: RunConfig, result: Result, display: Display) -> None:
    """What a user does next: look at the model, or go on."""
    folder = result.folder
    if result.stopped:
        display.line(f"stopped; the same command with --resume goes on ({folder / 'checkpoints'})")
        return
    if config.evaluation.completion_tokens:
        text = processes.call_in_child(_sample, config, folder, on_progress=display.step)
        display.step_done()
        display.line(f"completion        {text!r}")
    display.line(f"model             {folder / 'model'}")
    display.line(f"checkpoints       {folder / 'checkpoints'}")
    display.line(f"metrics           {folder / 'metrics.jsonl'}, {folder / 'summary.json'}")


def _sample(config: RunConfig, folder: Path, progress: Callable[[str, float], None]) -> str:
    from dilocox.api import generate

    progress("sampling a completion", 0.0)
    evaluation = config.evaluation
    return generate(
        folder, evaluation.prompt, tokens=evaluation.completion_tokens, seed=config.run.seed
    )


def _refuse_finished(folder: Path) -> None:
    summary = folder / "summary.json"
    if summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["phase"] == "finished":
        raise TrainingError(
            f"{folder}: this run is finished, its model is in {folder / 'model'}; to train on, "
            "begin a new run with model.path set to it"
        )


def _first_word(pipe: Connection, coordinator: BaseProcess, display: Display) -> Endpoint:
    """Wait until the coordinator listens."""
    while True:
        try:
            kind, value = pipe.recv()
        except EOFError:
            coordinator.join()
            raise TrainingError(f"the coordinator {processes.why_ended(coordinator)}") from None
        if kind == "ready":
            return Endpoint(**value)
        if kind != "record":
            raise TrainingError(value)
        display.show(value)


def _watch(
    pipe: Connection,
    coordinator: BaseProcess,
    sites: dict[str, BaseProcess],
    endpoint: Endpoint,
    config: RunConfig,
    display: Display,
) -> dict[str, Any]:
    """Show what comes until the coordinator says how the run ended."""
    interrupts = 0
    running = dict(sites)
    while True:
        try:
            sentinels = [process.sentinel for process in running.values()]
            for ready in wait([pipe, *sentinels]):
                if ready is pipe:
                    kind, value = pipe.recv()
                    if kind == "record":
                        display.show(value)
                    elif kind == "end":
                        return dict(value)
                    else:
                        raise TrainingError(value)
            for site in [name for name, process in running.items() if not process.is_alive()]:
                del running[site]
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts > 1:
                raise
            display.line("stopping at the next slot end with a checkpoint (again: at once)")
            _operator(endpoint, config).stop("interrupted")
        except EOFError:
            coordinator.join()
            raise TrainingError(f"the coordinator {processes.why_ended(coordinator)}") from None


def _operator(endpoint: Endpoint, config: RunConfig) -> CoordinatorClient:
    identity = Identity.load(endpoint.operator)
    return CoordinatorClient(endpoint.url, identity, Timeouts.derive(config.network))


def _coordinate_in_child(config: RunConfig, folder: Path, resume: bool, pipe: Connection) -> None:
    # Where the reader has gone this process is about to end with it.
    def tell(kind: str, value: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            pipe.send((kind, value))

    try:
        end = _coordinate(
            config,
            folder,
            resume=resume,
            wait_for=None,
            emit=lambda record: tell("record", record),
            on_ready=lambda endpoint: tell("ready", vars(endpoint)),
        )
    except DilocoxError as error:
        tell("error", str(error))
        sys.exit(1)
    tell("end", end)


def _coordinate(
    config: RunConfig,
    folder: Path,
    *,
    resume: bool,
    wait_for: int | None,
    emit: Callable[[Record], None],
    on_ready: Callable[[Endpoint], None],
) -> dict[str, Any]:
    """Serve a run to its end: phase, reason and summary."""
    recorder = Recorder(config, folder, emit)
    status = serve(
        config,
        folder / "coordinator",
        wait_for=wait_for,
        resume=resume,
        on_report=recorder.report,
        on_message=recorder.message,
        on_resumed=recorder.forget_after,
        on_ready=on_ready,
        ready_file=folder / "coordinator" / ENDPOINT,
    )
    summary = recorder.finish(status.phase, status.reason)
    return {"phase": status.phase, "reason": status.reason, "summary": summary}


def coordinate(
    config: RunConfig,
    *,
    run_file: Path,
    overrides: Sequence[str],
    wait_for: int | None,
    resume: bool,
) -> int:
    """`dilocox coordinator`: serve a run whose sites join from other machines; exit code."""
    display = Display(config)
    folder = preflight.claim_folder(config, resume)
    preflight.check_coordinator(config)
    (folder / "run.toml").write_text(config.to_toml(), encoding="utf-8")

    def ready(endpoint: Endpoint) -> None:
        host, port = host_and_port(endpoint.url)
        display.line(Timeouts.derive(config.network).table())
        display.line(f"coordinator of run {config.run.name} on {host}:{port}; at each site run")
        sets = "".join(f" --set {item}" for item in overrides)
        for site in config.sites:
            display.line(
                f"  dilocox join {host}:{port} --site {site} --run {run_file}{sets} "
                f"--token {endpoint.token}"
            )

    end = _coordinate(
        config, folder, resume=resume, wait_for=wait_for, emit=display.show, on_ready=ready
    )
    display.summary(end["summary"])
    if end["phase"] == "failed":
        raise TrainingError(f"run {config.run.name} failed: {end['reason']}")
    return 0 if end["phase"] == "finished" else 130


def join(config: RunConfig, *, site: str, address: str, token: str, debug: bool) -> int:
    """`dilocox join`: take part in a run as `site`; exit code.

    Under torchrun or Slurm this process is one rank of the site; else it starts all of them.
    """
    if site not in config.sites:
        known = ", ".join(config.sites)
        raise JoinError(f"site {site!r}: not in the run file, which names: {known}")
    torch.set_num_threads(1)
    url = f"https://{address.removeprefix('https://')}"
    host_and_port(url)
    variables = rank_variables()
    if variables is not None:
        return _join_as_rank(config, site, url, token, variables, debug)
    display = Display(config)
    files = prepare_data(config, display)
    preflight.check_run(config, files.vocabulary_size, sites_here=1)
    shared = (config.folder / "coordinator" / ENDPOINT).exists()
    return run_site(config, site, Endpoint(url, token, ""), Hooks(), debug, config.folder, shared)


def _site_in_child(
    config: RunConfig, site: str, endpoint: Endpoint, hooks: Hooks, debug: bool, folder: Path
) -> None:
    try:
        code = run_site(config, site, endpoint, hooks, debug, folder, True)
    except DilocoxError as error:
        print(f"dilocox: site {site}: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def run_site(
    config: RunConfig,
    site: str,
    endpoint: Endpoint,
    hooks: Hooks,
    debug: bool,
    folder: Path,
    shared_folder: bool,
) -> int:
    """Enrol a site, start its ranks and watch over them; exit code.

    A rank that dies takes its site down: the others are told at once, and the ranks ended.
    """
    identity = _enrol(config, site, endpoint)
    errors = processes.CONTEXT.SimpleQueue()
    address = exchange_address(config, site, endpoint.url)
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

    old = {n: signal.signal(n, asked_to_go) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            alive = [rank for rank in ranks if rank.is_alive()]
            failed = [rank for rank in ranks if rank.exitcode not in (None, 0)]
            if stop["reason"]:
                _leave(config, site, endpoint, identity, stop["reason"], failed=False)
                return 130
            if failed:
                # The rank that failed first is the one that knows why.
                time.sleep(0.2)
                said = None if errors.empty() else errors.get()
                reason = said or f"{failed[0].name} {processes.why_ended(failed[0])}"
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


def _join_as_rank(
    config: RunConfig, site: str, url: str, token: str, variables: RankVariables, debug: bool
) -> int:
    if variables.world != config.site.ranks:
        raise JoinError(
            f"site {site}: {variables.world} ranks were started, the run file asks for stages x "
            f"shards = {config.site.ranks}; start {config.site.ranks} or change [site]"
        )
    variables.export()
    timeouts = Timeouts.derive(config.network)
    stage, shard = divmod(variables.rank, config.site.shards)
    device = resolve_device(config.site, variables.local_rank)
    from datetime import timedelta

    mesh = start_site_group(
        config.site.stages, config.site.shards, device, timedelta(seconds=timeouts.stall)
    )
    said: list[str] = []
    if variables.rank == 0:
        try:
            prepare_data(config)
            said = [Identity.to_text(_enrol(config, site, Endpoint(url, token, "")))]
        except DilocoxError as error:
            said = ["", str(error)]
    said = mesh.gather_names(said)[0]
    if len(said) > 1:
        raise JoinError(said[1])
    job = RankJob(
        config=config,
        place=Place(site, stage, shard),
        url=url,
        identity=Identity.from_text(said[0]),
        hooks=Hooks(),
        address=exchange_address(config, site, url),
        meeting=None,
        local_rank=variables.local_rank,
        ranks_here=variables.local_world,
        shared_folder=False,
        log_file=None,
        debug=debug,
    )
    return run_rank(job, lambda line: print(f"dilocox: {line}", file=sys.stderr))


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
