"""`dilocox audit` and `dilocox auditor`: repeat rounds, and print and sign the verdicts."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dilocox.errors import ConfigError, RecordError
from dilocox.utils.plain_text import plain

if TYPE_CHECKING:
    from dilocox.record.log.audit_verdicts import Signed, Verdict
    from dilocox.record.log.statements import Signer
    from dilocox.tools.audit.audited_run import AuditedRun, Chosen
    from dilocox.training.launch.verdict_hand_in import HandIn

HELP = "repeat rounds of a site from the states that the site has kept"
AUDITOR_HELP = "audit a run while it goes on: the rounds that its log selects"
COLOURS = {"EXACT": "green", "WITHIN_TOL": "green", "NOT_RUN": "yellow"}
LOOK_EVERY = 1.0
"""Seconds between two looks of an auditor at the log, to see whether it has grown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox audit` to `parser`."""
    _add_common(parser)
    parser.add_argument("--site", help="audit rounds of this site (default: all sites)")
    parser.add_argument("--round", type=int, metavar="N", help="audit this round (default: all)")
    parser.add_argument(
        "--sample", type=share, metavar="SHARE",
        help="audit only this share of the rounds, 5%% or 0.05, which the log selects; at least "
        "one round",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    parser.set_defaults(call=run)


def add_auditor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox auditor` to `parser`."""
    _add_common(parser, "?")
    parser.add_argument(
        "--sample", type=share, metavar="SHARE",
        help="audit this share of the rounds, 5%% or 0.05 (default: record.audit_rate of the run "
        "file)",
    )  # fmt: skip
    parser.add_argument(
        "--show-key", action="store_true",
        help="with --key, without RUN: print the auditor's public key, which run files name in "
        "settlement.auditors, and end",
    )  # fmt: skip
    parser.set_defaults(call=run_auditor)


def _add_common(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument("run", metavar="RUN", nargs=nargs, help="a run's folder")
    parser.add_argument(
        "--key", type=Path, metavar="FILE",
        help="file of the auditor's own key; it is created if it does not exist (default: a new "
        "key that is not kept)",
    )  # fmt: skip
    parser.add_argument(
        "--log-key", metavar="NAME+HASH+KEY", help="the log's key, as its owner has told it to you"
    )
    parser.add_argument(
        "--store", action="append", default=[], metavar="PLACE",
        help="a further store of states and payloads, folder or URL; may be given several times",
    )  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="the run's token files")
    parser.add_argument(
        "--code", type=Path, metavar="FILE",
        help="the file with the run's own functions (site.code), whose SHA-256 is the run's "
        "run.code; it is run here",
    )  # fmt: skip
    parser.add_argument(
        "--hand-in", action="store_true",
        help="have the verdicts named in the run's log, so that nobody can remove one unnoticed",
    )  # fmt: skip
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT",
        help="with --hand-in: address of the run's coordinator, while the run goes on. Without "
        "it, RUN must be the coordinator's own folder",
    )  # fmt: skip
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="with --coordinator: file with a site's join token (default: the environment "
        "variable DILOCOX_TOKEN, else a prompt)",
    )  # fmt: skip
    parser.add_argument(
        "--randomness", type=Path, metavar="FILE",
        help="file with lines `ROUND HEX`: public randomness from which rounds are selected",
    )  # fmt: skip


def share(text: str) -> float:
    """Return the share above 0 and up to 1 that `text` names, such as `5%` or `0.05`.

    Raises `argparse.ArgumentTypeError` for any other text.
    """
    try:
        value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: give 5% or 0.05")
    return value


def run(options: argparse.Namespace) -> int:
    """Audit rounds and print the verdicts. Returns the exit code, see `exit_code`.

    Raises `ConfigError` if options contradict each other, and `RecordError` if the record or a
    key cannot be read, or if a round's public randomness is missing.
    """
    from dilocox.record.verify.audit_sampling import read_randomness
    from dilocox.training.launch import verdict_hand_in
    from dilocox.training.launch.forking import stay_forkable

    stay_forkable()
    if options.sample is not None and (options.site or options.round is not None):
        raise ConfigError(
            "--sample selects sites and rounds itself: leave out --site and --round, or --sample"
        )
    if options.randomness is not None and options.sample is None:
        raise ConfigError(
            "--randomness is used to select rounds: add --sample, or leave --randomness out"
        )
    audited, signer = _opened(options), _signer(options.key)
    _check_site(audited, options.site)
    log = verdict_hand_in.opened(options, audited.folder, audited.course, signer)
    console = Console(highlight=False, soft_wrap=True, quiet=options.json)
    if options.sample is not None:
        randomness = read_randomness(options.randomness) if options.randomness else None
        chosen = audited.sampled(options.sample, randomness)
    else:
        chosen = audited.requested(options.site, options.round)
    found = [_audit(audited, each, signer, console, log).verdict for each in chosen]
    code = exit_code(found, log)
    if options.json:
        print(json.dumps(as_json(audited, found, signer, log), indent=2))
    else:
        _conclude(audited, found, signer, console, options.key, log)
    return code


def run_auditor(options: argparse.Namespace) -> int:
    """Audit the selected rounds until the run ends. Returns the exit code, see `exit_code`.

    The exit code is also 0 if no round was selected and no verdict failed to be handed in. It is 3
    if a round is left whose public randomness is not in the file, and no verdict is bad.
    """
    from dilocox.record.log.audit_verdicts import read_all
    from dilocox.training.launch import verdict_hand_in
    from dilocox.training.launch.forking import stay_forkable

    if options.show_key:
        return _show_key(options)
    if options.run is None:
        raise ConfigError("RUN: name the run's folder")
    stay_forkable()
    audited, signer = _opened(options), _signer(options.key)
    log = verdict_hand_in.opened(options, audited.folder, audited.course, signer)
    rate = options.sample
    if rate is None:
        rate = float(audited.course.config["record"].get("audit_rate", 0.0))
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"auditing {rate:.0%} of the rounds of run {audited.course.run[:12]} that keep states; "
        "Ctrl-C ends it"
    )
    earlier = read_all(audited.folder, audited.course.run)
    own = [each for each in earlier if each.auditor == signer.public]
    found: list[Verdict] = []
    done: set[tuple[int, int, int]] = set()
    while True:
        over = audited.over()
        audited.refresh()
        for chosen in _selected(audited, rate, options.randomness, done):
            if not _is_audited(audited, chosen, own):
                own.append(_audit(audited, chosen, signer, console, log))
                found.append(own[-1].verdict)
        if over:
            break
        time.sleep(LOOK_EVERY)
    left = [] if options.randomness is None else _left(audited, done)
    _conclude(audited, found, signer, console, options.key, log)
    code = exit_code(found, log) if found or (log is not None and log.failed) else 0
    if left:
        console.print(f"[bold red]not audited[/]: {escape(_later(left, options))}")
    return code or (3 if left else 0)


def _show_key(options: argparse.Namespace) -> int:
    """Print the public key of an auditor who has not begun. Raises `ConfigError` without a file."""
    if options.key is None or options.run is not None:
        raise ConfigError("--show-key: give the file of the key with --key, and no RUN")
    print(_signer(options.key).public)
    return 0


def _selected(
    audited: AuditedRun, rate: float, randomness: Path | None, done: set[tuple[int, int, int]]
) -> Iterator[Chosen]:
    """Yield the selected audits of the rounds that are due and not in `done`.

    Adds these rounds to `done`. A round that was decided again, or after which the run was
    resumed, counts as another round. If the selection uses public randomness, a round waits
    until the file `randomness` holds its value.
    """
    from dilocox.record.verify.audit_sampling import read_randomness

    values = None if randomness is None else read_randomness(randomness)
    for this in _due(audited):
        round_ = this[0]
        if this in done or (values is not None and round_ not in values):
            continue
        done.add(this)
        value = b"" if values is None else values[round_]
        for draw, chosen in audited.drawn(round_, rate, value):
            if draw < rate:
                yield chosen


def _due(audited: AuditedRun) -> list[tuple[int, int, int]]:
    """Return the rounds that are due, each with the facts by which a round is another one."""
    from dilocox.record.verify.audit_sampling import due_rounds, size_of

    course = audited.course
    return [(round_, size_of(course, round_), course.since) for round_ in due_rounds(course)]


def _left(audited: AuditedRun, done: Collection[tuple[int, int, int]]) -> list[int]:
    """Return the rounds that are due and from which nothing was selected, for lack of a value."""
    return [this[0] for this in _due(audited) if this not in done]


def _later(left: Sequence[int], options: argparse.Namespace) -> str:
    """Say which rounds an auditor has left, and how to go on."""
    which = f"round {left[0]}" + (f" and {len(left) - 1} more" if left[1:] else "")
    again = "which then audits these rounds" if options.key else (
        "with --key FILE; this key was not kept, so it audits all rounds again"
    )  # fmt: skip
    return (
        f"{which}, of which {options.randomness} has no value: add the values, and call the same "
        f"command again, {again}"
    )


def _is_audited(audited: AuditedRun, chosen: Chosen, own: Sequence[Signed]) -> bool:
    """Whether one of an auditor's `own` verdicts is about `chosen` and is still valid."""
    from dilocox.record.verify.verdict_validity import still_standing

    where = (chosen.round, chosen.site)
    there = [each for each in own if (each.verdict.round, each.verdict.site) == where]
    return bool(still_standing(audited.course, audited.entries, there))


def _opened(options: argparse.Namespace) -> AuditedRun:
    from dilocox.tools.audit.audited_run import AuditedRun

    if "://" in options.run:
        raise RecordError(
            f"{options.run}: an audit writes its verdicts into the run's folder; copy the run here"
        )
    return AuditedRun(
        Path(options.run), tuple(options.store), options.data, options.log_key, options.code
    )


def _check_site(audited: AuditedRun, site: str | None) -> None:
    names = sorted(audited.course.config["sites"])
    if site is not None and site not in names:
        raise ConfigError(f"--site {site}: not in the run, which names: {', '.join(names)}")


def _signer(path: Path | None) -> Signer:
    """Return the auditor's key from the file `path`, which is created if it does not exist.

    None makes a new key that is not kept. Raises `RecordError` if the file holds no key.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from dilocox.coordinator.identity import write_private
    from dilocox.record.log.statements import Signer

    fresh = Ed25519PrivateKey.generate().private_bytes_raw().hex()
    if path is None:
        return Signer.from_hex(fresh)
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_private(path, f"{fresh}\n".encode())
        return Signer.from_hex(path.read_text(encoding="utf-8").strip())
    except OSError as error:
        reason = error.strerror
        raise RecordError(f"--key {path}: cannot be used ({reason}); name another file") from None
    except ValueError as error:
        raise RecordError(f"--key {path}: not a key ({error}); name another file") from None


def _audit(
    audited: AuditedRun, chosen: Chosen, signer: Signer, console: Console, log: HandIn | None
) -> Signed:
    from dilocox.record.log.audit_verdicts import Signed, write
    from dilocox.record.writer.notary import code_digest
    from dilocox.tools.audit.judge import judge
    from dilocox.tools.audit.site_replay import repeat_site

    title, seen = f"round {chosen.round} of {chosen.site}", audited.seen()
    with _bar(console, title, audited.steps_of(chosen.site, chosen.round)) as progress:
        verdict = judge(audited.case(), chosen.site, chosen.round, repeat_site, progress)
    signed = Signed(verdict, chosen.selection, signer.public, audited.course.run, seen)
    before = [each for each in audited.course.verdicts if each.auditor == signer.public]
    named = {each.digest for each in before}.union(() if log is None else log.named)
    path = write(audited.folder, signed, signer, code_digest(), named)
    if log is not None:
        log.file(path)
    _show(verdict, console)
    if log is None and (chosen.round, chosen.site) in {(each.round, each.site) for each in before}:
        console.print("            the log names an earlier verdict of this key: --hand-in names "
                      "this one, too")  # fmt: skip
    return signed


@contextlib.contextmanager
def _bar(console: Console, title: str, steps: int) -> Iterator[Callable[[int], None]]:
    if not console.is_terminal or console.quiet:
        yield lambda step: None
        return
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("step {task.completed}"),
        TimeElapsedColumn(), console=console, transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task(title, total=steps)
        yield lambda step: bar.update(task, completed=step)


def _show(verdict: Verdict, console: Console) -> None:
    colour = COLOURS.get(verdict.verdict, "bold red")
    where = escape(plain(f"round {verdict.round:<4} {verdict.site}"))
    step = verdict.first_bad_step
    first = "" if step is None or step < 0 else f"first bad step {step}: "
    console.print(
        f"[{colour}]{verdict.verdict:<10}[/]  {where}: {first}{escape(plain(verdict.reason))}"
    )


def _conclude(
    audited: AuditedRun,
    found: Sequence[Verdict],
    signer: Signer,
    console: Console,
    key: Path | None,
    log: HandIn | None,
) -> None:
    _tell(log, console)
    if not found:
        console.print(
            "nothing was audited: no decided and selected round has a kept state "
            "(record.states_every)"
        )
        return
    once = "" if key else " (this key was not kept: --key FILE keeps a key)"
    place = audited.folder / "record" / "audits"
    verdicts = f"{len(found)} verdict" + ("" if len(found) == 1 else "s")
    console.print(f"{verdicts} in {place}, signed by {signer.public}{once}")


def _tell(log: HandIn | None, console: Console) -> None:
    """Print which verdicts were handed in, and why others were not."""
    if log is None:
        return
    console.print(f"named in the run's log: {log.done}")
    for reason in log.failed:
        console.print(f"[bold red]not named[/] in the run's log: {escape(plain(reason))}")


def as_json(
    audited: AuditedRun, found: Sequence[Verdict], signer: Signer, log: HandIn | None = None
) -> dict[str, Any]:
    """Return the verdicts `found`, and what was handed in, in the form that `--json` prints.

    `log` is None if no verdict was to be handed in.
    """
    told = {} if log is None else {"handed_in": log.done, "not_handed_in": log.failed}
    return {
        "run": audited.course.run,
        "auditor": signer.public,
        "exit_code": exit_code(found, log),
        **told,
        "verdicts": [asdict(verdict) for verdict in found],
    }


def exit_code(found: Sequence[Verdict], log: HandIn | None = None) -> int:
    """Return the exit code for the verdicts `found`.

    0: all verdicts are good. 1: a verdict is bad. 3: there is no verdict, an audit was not run,
    or a verdict was not handed in.
    """
    from dilocox.record.log.audit_verdicts import BAD, GOOD

    if any(verdict.verdict in BAD for verdict in found):
        return 1
    missed = log is not None and log.failed
    return 0 if found and not missed and all(each.verdict in GOOD for each in found) else 3
