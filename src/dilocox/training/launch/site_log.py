"""The lines that `dilocox join` prints for its site, and the site's journal.

There is one line per event and per round. Everything that a site's leading rank reports to the
coordinator is also shown at the site.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.protocol.held_out_figures import beside_text
from dilocox.coordinator.protocol.messages import ReportKind
from dilocox.coordinator.protocol.site_reports import FIRST, JOURNALS, RESERVED
from dilocox.coordinator.protocol.task_figures import line as line_of_tasks
from dilocox.coordinator.protocol.task_figures import reported
from dilocox.errors import DilocoxError
from dilocox.record.verify.metric_reports import signed_report
from dilocox.record.writer.rank_recorder import SigningIdentity
from dilocox.utils.formatting import number, size
from dilocox.utils.plain_text import plain_lines

log = logging.getLogger(__name__)

Say = Callable[[str], None]


def say(line: str) -> None:
    """Print a line, and flush it, so that it is shown at once even without a terminal."""
    print(plain_lines(line), flush=True)


def note(config: RunConfig, site: str, kind: str, /, **fields: Any) -> None:
    """Append a line to the site's journal. If the disk fails, the line is lost, not the run."""
    path = config.folder / JOURNALS.replace("*", site)
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in fields.items()
    }
    line = json.dumps({"time": round(time.time(), 3), "kind": kind, **finite}, allow_nan=False)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def note_joined(config: RunConfig, site: str, coordinator: str) -> None:
    """Write to the journal that this process has taken the site into the run."""
    note(
        config, site, "joined", run=config.run.name, steps=config.total_steps,
        coordinator=coordinator, process=os.getpid(), host=socket.gethostname(),
    )  # fmt: skip


class TellingClient(CoordinatorClient):
    """A `CoordinatorClient` whose reports are shown at the site as well."""

    tell: Say | None = None
    author: SigningIdentity | None = None
    """Identity that signs the reports. None if the run is not recorded."""
    journal: Callable[..., None] | None = None
    """Gets kind and fields of every report. May be None: then there is no journal."""

    def report(self, round_: int, metrics: Mapping[str, Any], kind: ReportKind = "round") -> bool:
        """Report metrics (JSON values) of this site's round, and show them at the site.

        Returns whether the report is in the run's metrics. Only then the site signs it: a signed
        report that the metrics lack would look as if one of both sides had lied.
        """
        kept = super().report(round_, metrics, kind)
        if kept:
            self._sign(round_, metrics, kind)
        line = line_of(kind, round_, metrics)
        if self.tell is not None and line is not None:
            self.tell(line)
        if self.journal is not None and line is not None:
            known = next((own for own, first in FIRST.items() if kind == first), kind)
            said = {key: value for key, value in metrics.items() if key not in RESERVED}
            self.journal(known, round=round_, **said)
        return kept

    def _sign(self, round_: int, metrics: Mapping[str, Any], kind: str) -> None:
        """Sign a report that the coordinator has kept. A failure does not end the run."""
        if self.author is None:
            return
        try:
            statement = signed_report(self.author, kind, round_, metrics)
            if statement is not None:
                self.record_state(statement)
        except (DilocoxError, ValueError) as error:
            log.warning("the report of round %d is not signed: %s", round_, error)


def line_of(kind: str, round_: int, metrics: Mapping[str, Any]) -> str | None:
    """Return a report as a line for users. None for a kind that only the coordinator needs."""
    if kind == "warning":
        return str(metrics["text"])
    if kind in ("evaluation", "first_evaluation"):
        when = "before training" if metrics["after_round"] < 0 else "of the anchor"
        return f"held-out loss {when}: {metrics['val_loss']:.4f}{beside_text(metrics)}"
    if kind in ("tasks", "first_tasks"):
        return line_of_tasks(reported(metrics), metrics["after_round"])
    if kind == "flush":
        return f"round {round_:>3}  flush: the last exchanges of the run have landed"
    if kind != "round":
        return None
    loss = f"{metrics['loss']:.3f}" if "loss" in metrics else "-"
    return (
        f"round {round_:>3}  step {metrics['step']}  loss {loss}  "
        f"{number(metrics['tokens_per_second']):>6} tokens/s  "
        f"waited {metrics['wait_share']:5.1%}  sent {size(metrics['payload_bytes'])}"
    )


def joined(site: str, run: str, coordinator: str) -> str:
    """Return the line of a site that has joined a run."""
    return f"site {site} has joined run {run} at {coordinator}; its ranks build the model"


def begins(site: str, round_: int | None) -> str:
    """Return the line of a site whose ranks are ready.

    `round_`: first round that the site trains. None if it must fetch the model first.
    """
    if round_ is None:
        return f"site {site} takes over the model from another site"
    return f"site {site} takes part from round {round_} on"


def end(config: RunConfig, site: str) -> str:
    """Return the last line of a site that has ended without an error: where the model is."""
    model = config.folder / "model"
    if model.is_dir():
        return f"site {site} is done; model {model}"
    return (
        f"site {site} is done; no model was published here: the run has stopped, another site of "
        f"this folder publishes it, or the site was taken out ({config.checkpoint_store})"
    )
