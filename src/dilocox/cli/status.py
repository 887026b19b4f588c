"""`dilocox status`: print the state of a run, in a few lines or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dilocox.config.run_config import load_written
from dilocox.coordinator.metrics.privacy import words as privacy_words
from dilocox.coordinator.protocol.held_out_figures import (
    losses_by_source,
    pair_figures,
    pair_text,
    source_text,
)
from dilocox.coordinator.protocol.task_figures import line as task_line
from dilocox.coordinator.protocol.task_figures import reported
from dilocox.errors import ConfigError, DilocoxError
from dilocox.tools.report.status import GOES_ON, SiteNow, Status, real, status_of, whole
from dilocox.training.launch.console import plan_line
from dilocox.training.launch.join_token import read_token
from dilocox.utils.formatting import number
from dilocox.utils.plain_text import plain

HELP = "print the state of a run, from the run folder of its coordinator or of a site"
_ADDRESS = re.compile(r"[^/]+:[0-9]{1,5}")
PATIENCE = 2.0
"""Seconds within which a coordinator must answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox status` to `parser`."""
    parser.add_argument(
        "run", metavar="RUN|HOST:PORT",
        help="run folder of the coordinator or of a site, or the coordinator's address",
    )  # fmt: skip
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="with an address: file with a site's join token (default: the environment variable "
        "DILOCOX_TOKEN, else a prompt)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the whole state as JSON")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Print the status. Returns the exit code.

    The exit code is 0 if the run goes on or is finished, 3 if it was stopped, and 1 otherwise.
    """
    now, folder = time.time(), Path(options.run)
    if _ADDRESS.fullmatch(options.run) and not folder.exists():
        found = of_address(options.run, read_token(options.token_file))
    elif options.token_file is not None:
        raise ConfigError("--token-file needs an address, HOST:PORT, instead of a folder: omit it")
    else:
        found = status_of(folder, now)
        if found.of == "coordinator" and found.state in GOES_ON:
            ask(found, folder)
    if options.json:
        print(json.dumps({**asdict(found), "exit_code": found.exit_code}, indent=2))
    else:
        for line in lines(found, now):
            print(plain(line))
    return found.exit_code


def of_address(address: str, token: str) -> Status:
    """Ask the coordinator at `address` (HOST:PORT) for the status of its run.

    `token` is a site's join token. Raises `JoinError` if the coordinator does not answer within
    `PATIENCE`, or refuses the token.
    """
    from dilocox.config.network import NetworkSection
    from dilocox.coordinator.client.enrolment import look
    from dilocox.coordinator.protocol.timeouts import Timeouts

    usual = Timeouts.derive(NetworkSection())
    patience = replace(usual, coordinator=PATIENCE, request=PATIENCE)
    said = look(f"https://{address}", token, patience)
    found = Status(address, "coordinator", "", said.run, steps=said.steps, coordinator=address)
    for each in said.sites:
        own = each.metrics.get("round", {})
        site = SiteNow(
            each.site,
            each.role,
            round=whole(own, "round"),
            step=whole(own, "step"),
            seconds=real(own, "seconds"),
            tokens_per_second=real(own, "tokens_per_second"),
            loss=real(own, "loss"),
            wait_share=real(own, "wait_share"),
        )
        found.sites.append(site)
        for kind in ("first_evaluation", "evaluation"):
            told = each.metrics.get(kind, {})
            loss = real(told, "val_loss")
            if loss is not None:
                found.held_out_loss, found.held_out_after = loss, whole(told, "after_round")
                found.held_out_by_source = losses_by_source(told)
                found.held_out_pairs = pair_figures(told)
                found.held_out_first = loss if kind == "first_evaluation" else found.held_out_first
        for kind in ("first_tasks", "tasks"):
            found.tasks = each.metrics.get(kind, found.tasks)
    rounds = [site for site in found.sites if site.round is not None]
    if rounds:
        last = max(rounds, key=lambda site: site.round or 0)
        found.round, found.step, found.loss = last.round, last.step or 0, last.loss
    _take(found, said)
    return found


def _take(found: Status, said: Any) -> None:
    """Copy phase, reason, roles and lost sites from `said`, the coordinator's `Status`."""
    found.state = {
        "enrolling": "waits for sites", "starting": "joining", "running": "training",
    }.get(said.phase, said.phase)  # fmt: skip
    found.reason = said.reason
    roles = {site.site: site for site in said.sites}
    for each in found.sites:
        if each.name in roles:
            each.role = roles[each.name].role
            if each.role == "gone":
                found.warnings.append(f"{each.name} is gone: {roles[each.name].reason}")


def ask(found: Status, folder: Path) -> None:
    """Ask the coordinator of the run in `folder`, and add its answer to `found`.

    The answer has the phase and the role of every site. If the coordinator does not answer,
    `found` gets a warning.
    """
    from dilocox.coordinator.client.client import CoordinatorClient
    from dilocox.coordinator.client.endpoint import Endpoint
    from dilocox.coordinator.identity import Identity
    from dilocox.coordinator.protocol.timeouts import Timeouts

    try:
        endpoint = Endpoint.load(folder / "coordinator" / "endpoint.json")
        timeouts = Timeouts.derive(load_written(folder / "run.toml").network)
        patience = replace(timeouts, coordinator=PATIENCE, request=PATIENCE)
        client = CoordinatorClient(endpoint.url, Identity.load(endpoint.operator), patience)
        with contextlib.closing(client):
            said = client.status()
    except (OSError, ValueError, TypeError, DilocoxError) as error:
        found.warnings.append(f"the coordinator does not answer ({error})")
        return
    found.coordinator = endpoint.url.removeprefix("https://")
    _take(found, said)


def lines(found: Status, now: float) -> Iterator[str]:
    """Yield the lines in which the status is printed. `now` is in seconds since the epoch."""
    whose = "" if found.of == "coordinator" else f", site {found.of}"
    state = f"{found.state}{f' ({found.reason})' if found.reason else ''}"
    yield f"run {found.name or found.folder}{whose}: {state}"
    if found.coordinator:
        yield f"coordinator    {found.coordinator}"
    if found.round is not None:
        share = f" of {found.steps} ({found.step / found.steps:.0%})" if found.steps else ""
        left = found.seconds_left
        yield (
            f"training       round {found.round} is done, step {found.step}{share}"
            f"{f', about {span(left)} left' if left is not None and left > 0 else ''}"
            f"{f', loss {found.loss:.3f}' if found.loss is not None else ''}"
        )
    if found.held_out_loss is not None:
        after = found.held_out_after
        when = "before training" if after == -1 else f"after round {after}"
        first = found.held_out_first
        began = f" ({first:.4f} before training)" if first is not None and after != -1 else ""
        yield f"held-out loss  {found.held_out_loss:.4f} {when}{began}"
        if found.held_out_by_source:
            yield f"{'':15}{source_text(found.held_out_by_source).strip(' ()')}"
        if found.held_out_pairs:
            yield f"{'':15}{pair_text(found.held_out_pairs)}"
    if found.tasks is not None:
        after = whole(found.tasks, "after_round")
        yield task_line(reported(found.tasks), after).replace("tasks ", f"{'tasks':15}", 1)
    if found.plan is not None:
        with contextlib.suppress(KeyError, ValueError, TypeError):
            plan = " ".join(plan_line(found.plan).split()).replace(" plan:", ":", 1)
            yield f"plan           from {plan}"
    for name, figures in found.privacy.items():
        yield f"privacy        {name}: {privacy_words(figures)}"
    for site in found.sites:
        words = [f"site {site.name}"]
        if site.role:
            words.append(site.role)
        if site.round is not None:
            words.append(f"round {site.round}")
        if site.tokens_per_second is not None:
            words.append(f"{number(site.tokens_per_second)} tokens/s")
        if site.wait_share is not None:
            words.append(f"waited {site.wait_share:.1%}")
        if site.last_word is not None:
            words.append(f"last report {span(max(0.0, now - site.last_word))} ago")
        yield "  ".join(words)
    for text in found.warnings:
        yield f"warning: {text}"


def span(seconds: float) -> str:
    """Return a duration for people to read: `45 s`, `12 min`, `3.2 h`, `2.5 days`."""
    for unit, size, limit in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172_800.0)):
        if seconds < limit:
            return f"{seconds / size:.{1 if unit == 'h' else 0}f} {unit}"
    return f"{seconds / 86400:.1f} days"
