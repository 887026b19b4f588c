"""Prints a run for the user: one line per round, events, and a summary."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.metrics.privacy import words
from dilocox.coordinator.protocol.held_out_figures import beside_text, changes
from dilocox.coordinator.protocol.task_figures import line as task_line
from dilocox.coordinator.protocol.task_figures import reported
from dilocox.training.launch.supervisor import print_error
from dilocox.utils.formatting import number, size
from dilocox.utils.plain_text import plain, plain_lines

Record = dict[str, Any]
NOTABLE = 0.05
"""Share of a round for which the others must wait for a site before the line names the site."""


def round_line(record: Record, steps: int) -> str:
    """Return one line about a round of all sites, in a run of `steps` inner steps."""
    loss = f"{record['loss']:.3f}" if "loss" in record else "-"
    waited = record.get("waited_for", {})
    last = max(waited, key=lambda site: waited[site], default=None)
    whom = f" ({last} came last)" if last and waited[last] > NOTABLE * record["seconds"] else ""
    return (
        f"round {record['round']:>3}  step {record['step']:>{len(str(steps))}}/{steps}  "
        f"loss {loss}  "
        f"{number(record['tokens_per_second']):>6} tokens/s  "
        f"waited {record['wait_share']:5.1%}{whom}  "
        f"{device_words(record)}"
        f"sent {size(record['payload_bytes']):>8} (synchronous {size(record['allreduce_bytes'])}; "
        f"{record['ratio_per_transfer']:.1f}x per transfer, "
        f"{record['ratio_per_token']:.0f}x per token)"
    )


def device_words(record: Record) -> str:
    """Return MFU and memory of a round, with spaces after them. Empty if they are not known."""
    words = []
    if "mfu" in record:
        words.append(f"MFU {record['mfu']:.1%}")
    if "peak_memory_bytes" in record:
        words.append(f"memory {size(record['peak_memory_bytes'])}")
    if retries := record.get("allocation_retries"):
        words.append(f"(allocator retried {retries:.0f} times)")
    return "".join(f"{word}  " for word in words)


def plan_line(record: Record) -> str:
    """Return one line about the settings that were chosen for the next rounds."""
    number = record["fragments"]
    return (
        f"round {record['round']:>3}  plan: {record['inner_steps']} inner steps, "
        f"{number} fragment{'s' if number > 1 else ''}, codec {record['codec']}, "
        f"landing {record['delay']} of {record['slots']} slots later "
        f"({record['reason']})"
    )


class Display:
    """Prints a run's records, one line per round and event. On a terminal a bar is below them."""

    def __init__(self, config: RunConfig, console: Console | None = None) -> None:
        self._steps = config.total_steps
        self._adapts = config.control.adapt != "off"
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._lively = self._console.is_terminal
        self._progress: Progress | None = None
        self._task: Any = None

    def start(self) -> None:
        """Show the progress bar, if there is a terminal."""
        if not self._lively:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=self._steps)
        self._progress.start()

    def stop(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def line(self, text: str) -> None:
        """Print one or several lines, and flush them.

        Markup and control characters in the text have no effect, since a stranger may have
        written it.
        """
        self._console.print(escape(plain_lines(text)))
        self._console.file.flush()

    def step(self, text: str, share: float | None = None) -> None:
        """Show a step of the preparation, and its share done, in one line of a terminal."""
        if not self._lively:
            return
        done = "" if share is None else f" {share:4.0%}"
        sys.stdout.write(f"\r\x1b[K{plain(text)}{done}")
        sys.stdout.flush()

    def step_done(self) -> None:
        """Clear the line of `step`."""
        if self._lively:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()

    def show(self, record: Record) -> None:
        """Print a record of the run's metrics (see `dilocox.coordinator.metrics.run_metrics`)."""
        kind = record.get("kind")
        if kind == "round" and not record.get("site"):
            self.line(round_line(record, self._steps))
            if self._progress is not None:
                self._progress.update(self._task, completed=record["step"])
        elif kind == "plan" and self._adapts:
            self.line(plan_line(record))
        elif kind == "evaluation":
            when = "before training" if record["after_round"] < 0 else "of the anchor"
            self.line(f"held-out loss {when}: {record['val_loss']:.4f}{beside_text(record)}")
        elif kind == "tasks":
            self.line(task_line(reported(record), record["after_round"]))
        elif kind == "message":
            self.line(plain(record["text"]))

    def summary(self, record: Record) -> None:
        """Print the end of a run, in a few lines."""
        first, last = record.get("val_loss_first"), record.get("val_loss_last")
        if record.get("phase") == "finished" and record.get("reason"):
            self.line(f"ended early       {plain(record['reason'])}")
        if "tasks_last" in record:
            both = [record["tasks_first"], record["tasks_last"]]
            for own in both if both[0] != both[1] else both[1:]:
                said = task_line(reported(own), own["after_round"]).removeprefix("tasks ")
                self.line(f"tasks             {said}")
        if first is not None and last is not None:
            self.line(f"held-out loss     {first:.4f} before, {last:.4f} after")
            for name, text in changes(record).items():
                self.line(f"                  {name}: {text}")
        elif first is not None:
            self.line(
                f"held-out loss     {first:.4f} before training, not measured since "
                "(evaluation.every_rounds)"
            )
        self.line(
            f"trained           {number(record['tokens'])} tokens in {record['seconds']:.0f} s, "
            f"{number(record['tokens_per_second'])} tokens/s, "
            f"waited for the network {record['wait_share']:.1%}"
        )
        for site, figures in record.get("privacy", {}).items():
            self.line(f"privacy           {site}: {words(figures)}")
        if "mfu" in record:
            self.line(f"GPUs              {record['mfu']:.1%} MFU")
        if record["payload_bytes"]:
            self.line(
                f"sent              {size(record['payload_bytes'])} between sites; synchronous "
                f"training would have sent {size(record['allreduce_bytes'])} "
                f"({record['ratio_per_token']:.0f}x)"
            )


def tell(line: str, display: Display | None) -> None:
    """Print a line in `display`; None: to standard error."""
    if display is None:
        print_error(line)
    else:
        display.line(line)
