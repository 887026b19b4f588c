"""Starts a run with all its sites on this machine, or one site that joins a coordinator elsewhere.

Both use the same code: a coordinator (`dilocox.training.launch.coordinator_process`), and sites
that join it.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.controller.candidates import Menu
from dilocox.coordinator.metrics.run_metrics import Record
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.data import TokenFiles
from dilocox.errors import DilocoxError, TrainingError
from dilocox.inner import available_cores
from dilocox.models import count_parameters, load_model_config
from dilocox.training.builder import Hooks
from dilocox.training.code_file import with_code
from dilocox.training.launch import preflight, site_log
from dilocox.training.launch.console import Display
from dilocox.training.launch.coordinator_process import serve_run
from dilocox.training.launch.local_sites import LocalSites
from dilocox.training.launch.run_folder import claim_folder, write_run_file
from dilocox.training.launch.site import check_site, keep_site, pay_to_join
from dilocox.training.launch.supervisor import Ended, listening, print_error
from dilocox.training.launch.torchrun import Preparation, join_as_rank
from dilocox.training.launch.torchrun_env import rank_variables
from dilocox.training.run_model import generate
from dilocox.utils import chrome_trace, processes
from dilocox.utils.formatting import number

SAMPLED = 3 * 10**9
"""Most parameters of a model from which a finished run samples a completion. In fp32 they take
12 GB, and a CPU takes some seconds per token."""


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
        """Whether the run is complete."""
        return self.phase == "finished"

    @property
    def failed(self) -> bool:
        """Whether the run has failed."""
        return self.phase == "failed"

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped, with a checkpoint."""
        return self.phase == "stopped"


def train_here(
    config: RunConfig,
    hooks: Hooks,
    *,
    resume: bool,
    overwrite: bool,
    debug: bool,
    trace: bool = False,
) -> Result:
    """Train a run with all its sites on this machine, and return how it ended. See `api.train`.

    Ctrl-C or SIGTERM stops the run at a slot end with a checkpoint; a second one ends it at once.
    Raises `DilocoxError` if the run cannot start or fails.
    """
    config, hooks = with_code(config, hooks)
    display, folder = Display(config), config.folder
    role = preflight.Role("train", hooks, resume=resume, overwrite=overwrite)
    prepared = preflight.check(config, role, display)
    config = prepared.config
    display.line(prepared.headline)
    claim_folder(config, resume, overwrite)
    chrome_trace.discard(folder)
    try:
        with processes.term_as_interrupt():
            return _run_here(config, hooks, display, prepared.payloads, resume, debug, trace)
    finally:
        _show_trace(display, lambda: chrome_trace.merge_run(folder))


def _run_here(
    config: RunConfig,
    hooks: Hooks,
    display: Display,
    payloads: Menu | None,
    resume: bool,
    debug: bool,
    trace: bool,
) -> Result:
    """Run coordinator and sites in child processes to the end of the run."""
    folder = config.folder
    ours, theirs = processes.CONTEXT.Pipe(duplex=False)
    coordinator = processes.start(
        _coordinate_in_child, config, folder, payloads, resume, theirs, name="coordinator"
    )
    theirs.close()
    sites: dict[str, BaseProcess] = {}
    local: LocalSites | None = None
    reasons = processes.CONTEXT.SimpleQueue()
    grace = 10.0
    try:
        endpoint = _first_word(ours, coordinator, display)
        write_run_file(config)
        for site in endpoint.tokens:
            own = endpoint.of(site)
            sites[site] = processes.start(
                _site_in_child, config, site, own, hooks, debug, folder, trace, reasons, name=site
            )
        display.start()
        local = LocalSites(config, endpoint, sites, reasons)
        end = _watch(ours, coordinator, local, display)
        if end["phase"] == "failed":
            # The coordinator answers for two more heartbeats; after that, sites cannot reach it.
            grace = min(grace, 4 * Timeouts.derive(config.network).beat)
    except KeyboardInterrupt:
        grace = 0.0
        raise
    finally:
        display.stop()
        ours.close()
        processes.end([*sites.values(), coordinator], grace)
        if local is not None:
            local.say_rest()
    display.summary(end["summary"])
    result = Result(end["phase"], end["reason"], end["summary"], folder)
    if result.failed:
        raise TrainingError(f"run {config.run.name} failed: {end['reason']}")
    _last_words(config, result, display)
    return result


def _show_trace(display: Display, merge: Callable[[], Path | None]) -> None:
    """Write the recorded timeline, if there is one. An error does not make the run fail."""
    try:
        path = merge()
    except OSError as error:
        display.line(f"timeline          not written: {error}")
        return
    if path is not None:
        display.line(f"timeline          {path} (for ui.perfetto.dev or chrome://tracing)")


def _last_words(config: RunConfig, result: Result, display: Display) -> None:
    """Show the paths of the run's results, or how to resume the run."""
    folder = result.folder
    if result.stopped:
        display.line(f"stopped; the same command with --resume goes on ({config.checkpoint_store})")
        return
    if config.evaluation.completion_tokens:
        display.line(f"completion        {_completion(config, folder, display)}")
    display.line(f"model             {folder / 'model'}")
    display.line(f"checkpoints       {config.checkpoint_store}")
    display.line(f"metrics           {folder / 'metrics.jsonl'}, {folder / 'summary.json'}")
    if config.record.enabled:
        command = f"dilocox verify {shlex.quote(str(folder))}"
        display.line(f"record            {folder / 'record'}; check it: {command}")


def _completion(config: RunConfig, folder: Path, display: Display) -> str:
    """Return a sampled completion in quotes, or why there is none and how to sample one.

    The run is finished, so an error here does not make it fail.
    """
    command = f"dilocox generate {shlex.quote(str(folder))} samples one"
    try:
        vocabulary = TokenFiles.open(config.data_folder).vocabulary_size
        parameters = count_parameters(load_model_config(config.model, vocabulary))
        if parameters > SAMPLED:
            return f"left out, the model has {number(parameters)} parameters; {command}"
        text = processes.call_in_child(_sample, config, folder, on_progress=display.step)
    except DilocoxError as error:
        return f"left out ({error}); {command}"
    finally:
        display.step_done()
    return repr(text)


def _sample(config: RunConfig, folder: Path, progress: Callable[[str, float], None]) -> str:
    progress("sampling a completion", 0.0)
    # This process has no children and the ranks have ended, so all cores are free.
    torch.set_num_threads(available_cores())
    on_gpu = config.site.device != "cpu" and torch.cuda.is_available()
    evaluation = config.evaluation
    return generate(
        folder,
        evaluation.prompt,
        tokens=evaluation.completion_tokens,
        seed=config.run.seed,
        device="cuda" if on_gpu else "cpu",
    )


def _first_word(pipe: Connection, coordinator: BaseProcess, display: Display) -> Endpoint:
    """Wait until the coordinator listens, and return its address and the join tokens."""
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
    pipe: Connection, coordinator: BaseProcess, sites: LocalSites, display: Display
) -> dict[str, Any]:
    """Show the coordinator's records until the run ends, and return how it ended.

    Raises `KeyboardInterrupt` at the user's second request to end, and `TrainingError` if the
    coordinator fails, or if the run cannot begin or go on because a site has failed.
    """
    stopping = False
    with listening(second_interrupts=True) as asked:
        while True:
            if asked.times and not stopping:
                stopping = True
                display.line("stopping at the next slot end with a checkpoint (again: at once)")
                sites.operator().stop("interrupted")
            try:
                for ready in wait([pipe, *sites.sentinels], timeout=0.5):
                    if ready is pipe:
                        kind, value = pipe.recv()
                        if kind == "record":
                            display.show(value)
                        elif kind == "end":
                            sites.check_end()
                            return dict(value)
                        else:
                            raise TrainingError(value)
                sites.look(stopping, time.monotonic())
            except EOFError:
                coordinator.join()
                raise TrainingError(f"the coordinator {processes.why_ended(coordinator)}") from None


def _coordinate_in_child(
    config: RunConfig, folder: Path, payloads: Menu | None, resume: bool, pipe: Connection
) -> None:
    # A broken pipe means that the parent has ended, and this process is about to end, too.
    def tell(kind: str, value: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            pipe.send((kind, value))

    try:
        end = serve_run(
            config,
            folder,
            payloads,
            resume=resume,
            wait_for=None,
            emit=lambda record: tell("record", record),
            on_ready=lambda endpoint: tell("ready", vars(endpoint)),
        )
    except DilocoxError as error:
        tell("error", str(error))
        sys.exit(1)
    except Exception as error:
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "logs" / "coordinator.log").write_text(traceback.format_exc(), encoding="utf-8")
        tell("error", f"coordinator: {type(error).__name__}: {error} (see logs/coordinator.log)")
        sys.exit(1)
    tell("end", end)


def _site_in_child(
    config: RunConfig,
    site: str,
    endpoint: Endpoint,
    hooks: Hooks,
    debug: bool,
    folder: Path,
    trace: bool,
    reasons: Any,
) -> None:
    try:
        ended = keep_site(config, site, endpoint, hooks, debug, folder, True, trace)
    except DilocoxError as error:
        ended = Ended(1, f"site {site}: {str(error).removeprefix(f'site {site}: ')}")
    if ended.code == 1:
        reasons.put((site, ended.reason))
    sys.exit(ended.code)


def join(
    config: RunConfig,
    *,
    site: str,
    endpoint: Endpoint,
    debug: bool,
    trace: bool = False,
    hooks: Hooks | None = None,
    deposit: Callable[[], object] | None = None,
) -> int:
    """`dilocox join`: take part in a run as `site`, and return the exit code. See `api.join`.

    Under torchrun or Slurm this process is one rank of the site. Otherwise it starts all ranks of
    the site.

    Args:
        endpoint: address of the coordinator, and the site's token.
        hooks: the user's own functions; the run file must name the digest of their code.
        deposit: pays what the site has to pay before it joins. It is called once, by the first
            rank, after every check of this machine, and when the coordinator has said that it
            would admit the site.
    """
    config, hooks = with_code(config, hooks or Hooks())
    token = endpoint.tokens.get(site)
    role = preflight.Role("join", hooks, site=site, url=endpoint.url, token=token)
    variables = rank_variables()
    if variables is not None:
        preflight.check_process(config, role)
        first = replace(role, ranks_here=variables.local_world)
        return join_as_rank(
            config, site, endpoint, variables,
            Preparation(
                check=lambda: preflight.prepare(config, first),
                fetch=lambda: preflight.prepare(config, replace(role, command="rank")),
                pay=lambda: pay_to_join(config, site, endpoint, deposit),
            ),
            debug, trace, hooks,
        )  # fmt: skip
    display = Display(config)
    preflight.check(config, role, display)
    if deposit is not None:
        check_site(config, site, endpoint)
        pay_to_join(config, site, endpoint, deposit)
    try:
        ended = keep_site(config, site, endpoint, hooks, debug, config.folder, False, trace)
        if ended.code == 0:
            display.line(site_log.end(config, site))
        elif ended.code == 1:
            print_error(ended.reason)
        return ended.code
    finally:
        if trace:
            _show_trace(display, lambda: chrome_trace.merge_site(config.folder, site))
