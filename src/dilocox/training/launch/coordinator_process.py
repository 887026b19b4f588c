"""The coordinator's process: `dilocox coordinator`, and the coordinator of `dilocox train`."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig, load_written
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.controller.candidates import Menu
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.metrics.privacy import account_of
from dilocox.coordinator.metrics.run_metrics import Record, RunMetrics
from dilocox.coordinator.protocol.messages import StandingChange
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server.event_log import NAME as EVENTS
from dilocox.coordinator.server.generations import refuse_fenced, refuse_standby
from dilocox.coordinator.server.ledger import Ledger
from dilocox.coordinator.server.ledger_audit import audit
from dilocox.coordinator.server.reports import RunListener
from dilocox.coordinator.server.run_server import serve
from dilocox.coordinator.server.standby import SHARE, HeldBack, StandbyLink
from dilocox.coordinator.server.startup import EarlierRun, RunStart
from dilocox.coordinator.server.tokens import FOLDER as TOKENS
from dilocox.errors import ConfigError, SupersededError, TrainingError
from dilocox.record.log.run_end import mark_start
from dilocox.record.log.signed_note import LogCheckpoint, split_note
from dilocox.record.writer.notary import TransparencyLogSink
from dilocox.record.writer.one_writer import held
from dilocox.training.launch import preflight, standby
from dilocox.training.launch.console import Display
from dilocox.training.launch.coordinator_check import ENDPOINT
from dilocox.training.launch.run_folder import check_reachable, claim_folder, write_run_file
from dilocox.training.portable_checkpoint import Handover
from dilocox.utils.storage import replace_file

LOG_PATIENCE = 3.0
"""Seconds that a start waits for a process that is handing a verdict to the log of the folder."""
LEDGER = "ledger.json"
"""File in the run's folder, written at the end: which site was given which token ranges."""


def coordinate(
    config: RunConfig,
    *,
    run_file: Path,
    overrides: Sequence[str],
    wait_for: int | None,
    resume: bool,
    verbose: bool = False,
    take_over: bool = False,
    gone: bool = False,
) -> int:
    """`dilocox coordinator`: serve a run whose sites join from other machines.

    If the folder has a run that has not ended, the coordinator continues from its event log, on
    the same port. Sites that are still training then reach it again. `resume` goes back to the
    last checkpoint instead. `run_file` and `overrides` appear in the printed join lines. The run
    starts with `wait_for` sites; None means all. `verbose` also prints the table of time-outs.
    `take_over`: the folder is a standby's, which takes over; `gone`: see `standby.take_over`.

    Returns the exit code: 0 if the run is finished, 130 if it was stopped. Raises `DilocoxError`
    if the run cannot start, or if it failed.
    """
    display = Display(config)
    check_reachable(config.folder)
    refuse_fenced(config.folder / "coordinator")
    if not take_over:
        refuse_standby(config.folder / "coordinator")
    role = preflight.Role("coordinator", resume=resume, wait_for=wait_for)
    prepared = preflight.check(config, role)
    config, folder = prepared.config, config.folder
    go_on_ending = standby.take_over(config, gone, display.line) if take_over else None
    claim_folder(config, prepared.begun)

    def ready(endpoint: Endpoint) -> None:
        if go_on_ending is not None:
            go_on_ending()
        write_run_file(config)
        tokens = folder / "coordinator" / TOKENS
        # An IPv6 address keeps its brackets, as `dilocox join` expects.
        address = endpoint.url.removeprefix("https://")
        display.line(f"coordinator of run {config.run.name} on {address}; at each site run")
        sets = [part for item in overrides for part in ("--set", item)]
        for site in config.sites:
            if site not in endpoint.tokens:
                again = f"dilocox leave {shlex.quote(str(folder))} --site {site} --unban"
                display.line(f"  (site {site} is banned; {again} lets it join again)")
                continue
            words = ["dilocox", "join", address, "--site", site]
            words += ["--run-file", str(run_file), *sets, "--token-file", str(tokens / site)]
            display.line(f"  {shlex.join(words)}")
        display.line(
            f"each with a copy of the site's own file in {tokens}, readable by its owner only: "
            "whoever has the token can join as that site (without --token-file the command asks "
            "for the token)"
        )
        if verbose:
            display.line(Timeouts.derive(config.network).table())

    end = serve_run(
        config,
        folder,
        prepared.payloads,
        resume=resume,
        wait_for=wait_for,
        port=prepared.port,
        emit=display.show,
        on_ready=ready,
    )
    display.summary(end["summary"])
    if end["phase"] == "failed":
        raise TrainingError(
            f"run {config.run.name} failed: {end['reason']}; the same command with --resume goes "
            "back to its last checkpoint"
        )
    return 0 if end["phase"] == "finished" else 130


def leave(folder: Path, site: str, now: bool, change: StandingChange | None) -> str:
    """`dilocox leave`: take a site out of the run in `folder`, or change who may join as the site.

    Called on the coordinator's machine by a user who can read its folder.

    Args:
        now: the site leaves at once, not after its round.
        change: ban the site, lift its ban, or let it join with another key. None: none of these.

    Returns:
        One line that says what happens to the site.

    Raises:
        DilocoxError: the folder is not of a running coordinator, or the request is refused.
    """
    try:
        endpoint = Endpoint.load(folder / "coordinator" / ENDPOINT)
        config = load_written(folder / "run.toml")
    except (OSError, ValueError, TypeError, ConfigError) as error:
        raise TrainingError(
            f"{folder}: is not the folder of a coordinator whose run goes on ({error}); give the "
            "run folder on the coordinator's machine"
        ) from None
    timeouts = Timeouts.derive(config.network)
    patience = replace(timeouts, coordinator=timeouts.heartbeat)
    client = CoordinatorClient(endpoint.url, Identity.load(endpoint.operator), patience)
    try:
        if change is not None:
            return client.change_standing(site, change)
        return client.retire(site, "asked to by the operator", now=now)
    finally:
        client.close()


def serve_run(
    config: RunConfig,
    folder: Path,
    payloads: Menu | None,
    *,
    resume: bool,
    wait_for: int | None,
    emit: Callable[[Record], None],
    on_ready: Callable[[Endpoint], None],
    port: int | None = None,
) -> dict[str, Any]:
    """Serve a run to its end, and return phase, reason and summary.

    Args:
        payloads: sizes of payloads, see `payload_sizes`. None if plans do not adapt to the link.
        resume: go back to the last checkpoint.
        wait_for: number of sites with which the run starts. None: all sites of the run file.
        emit: gets every record of the run's metrics.
        on_ready: called with address and join tokens when the coordinator listens.
        port: port to listen on. None: `network.port`.

    Raises:
        TrainingError: another coordinator runs on this folder, or another machine goes on with
            the run.
    """
    patience = SHARE * Timeouts.derive(config.network).heartbeat
    with contextlib.ExitStack() as ends:
        if not ends.enter_context(held(folder / "coordinator", LOG_PATIENCE)):
            raise TrainingError(
                f"{folder}: another coordinator is running on this folder; stop it first"
            )
        refuse_fenced(folder / "coordinator")
        refuse_standby(folder / "coordinator")
        account = account_of(config, folder / "coordinator" / EVENTS)
        recorder = RunMetrics(config, folder, emit, account)
        warning = config.admission.warning(len(config.sites))
        if warning is not None:
            recorder.message(warning)
        link = StandbyLink(folder, patience, recorder.message)
        notary = None
        if config.record.enabled:
            notary = TransparencyLogSink.open(config, folder / "coordinator", recorder.message)
            ends.callback(notary.close)
            # A site signs a report that is in the metrics: a power cut must not take the report
            # and leave the signature.
            notary.writer.before_sync = recorder.sync
            mark_start(folder)
            if notary.log.anchor is not None:
                notary.log.hold = HeldBack(notary.log.anchor, link, _statements_of).take
            ends.enter_context(_abandoned_if_superseded(notary))
        status = serve(
            config,
            folder / "coordinator",
            RunStart(wait_for, payloads, lambda: earlier_run(config), link),
            RunListener(
                on_report=recorder.report,
                on_message=recorder.happened,
                on_plan=lambda plan: recorder.plan(plan.model_dump(mode="json")),
                on_resumed=lambda event: recorder.forget_after(event.round, event.plans),
                on_ready=on_ready,
                on_ledger=lambda ledger: _check_ledger(folder, ledger, recorder),
            ),
            port=port,
            resume=resume,
            notary=notary,
            ready_file=folder / "coordinator" / ENDPOINT,
        )
    summary = recorder.finish(status.phase, status.reason)
    return {"phase": status.phase, "reason": status.reason, "summary": summary}


def _statements_of(checkpoint: str) -> int:
    return LogCheckpoint.parse(split_note(checkpoint)[0]).size


@contextlib.contextmanager
def _abandoned_if_superseded(notary: TransparencyLogSink) -> Iterator[None]:
    """Sign nothing more once another coordinator goes on with the log."""
    try:
        yield
    except SupersededError:
        notary.abandon()
        raise


def earlier_run(config: RunConfig) -> EarlierRun:
    """Return the run from which a run with a handover continues.

    Raises `CheckpointError` if its handover cannot be read.
    """
    found = Handover.read(config.handover)
    return EarlierRun(found.run, found.steps, found.ledger)


def _check_ledger(folder: Path, ledger: Ledger, recorder: RunMetrics) -> None:
    """Check the run's token ranges at its end, and write them as `ledger.json`."""
    found = audit(ledger)
    recorder.sequences(asdict(found), found.problem)
    try:
        text = json.dumps(ledger.to_json(), separators=(",", ":")) + "\n"
        replace_file(folder / LEDGER, text.encode())
    except OSError as error:
        recorder.message(f"{folder / LEDGER} was not written ({error.strerror})")
