"""Real runs of the attacks benchmark, with a coordinator and four sites, one of them dishonest.

A subclass that exists in this module only alters the process of the site `rome`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

import dilocox
from benchmarks import common
from benchmarks.attacks import members as attacks_members
from benchmarks.attacks import texts as attacks_texts
from benchmarks.attacks.members import ALTERED, is_altered
from dilocox.coordinator.server import events
from dilocox.coordinator.server.event_log import EventLog
from dilocox.errors import DilocoxError
from dilocox.outer.fragment_state import FragmentState
from dilocox.training import builder
from dilocox.training.launch.data_preparation import prepare_data

SITES = ("paris", "lyon", "oslo", "rome")
GATED = {"aggregation": "clip", "gate": True}
REMARKS = {"large", "small", "against", "copied"}
"""Flags of contributions that count nevertheless."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One real run. At most one of `factor`, `member` and `text` is set: the attack of the altered
    site."""

    name: str
    factor: float | None = None
    """Factor by which the altered site multiplies its contribution."""
    member: attacks_members.Member | None = None
    text: str | None = None
    """Text of the altered site, a key of `benchmarks.attacks.texts.TEXTS`."""
    gated: bool = True
    sets: tuple[tuple[str, Any], ...] = ()
    """Keys of the run file, as `section.key`, and their values."""

    @property
    def beside(self) -> str:
        """Name of the case with the same settings in which all sites are honest."""
        return BY_SPEED.name if self.settings == BY_SPEED.sets else "real: none"

    @property
    def settings(self) -> tuple[tuple[str, Any], ...]:
        """All keys that differ from their usual values."""
        return self.sets + (() if self.member is None else self.member.sets)

    @property
    def rule(self) -> str:
        """Name of the rule of admission."""
        return "clip+gate" if self.gated else "mean"


BY_SPEED = Case("real: none, steps by speed", sets=attacks_members.BY_SPEED)
CASES = (
    Case("real: none", gated=False),
    Case("real: none"),
    BY_SPEED,
    Case("real: sign flip x10", -10.0, gated=False),
    Case("real: sign flip x10", -10.0),
    Case("real: zero", 0.0),
    *(Case(f"real: {member.name}", member=member) for member in attacks_members.MEMBERS),
    *(Case(f"real: {text}", text=text) for text in attacks_texts.TEXTS),
)


def altered(factor: float) -> type[FragmentState]:
    """Return a fragment state that multiplies the contributions of the altered site by `factor`."""

    class Altered(FragmentState):
        def boundary(
            self, live: Mapping[str, Tensor], weight: float, decay: float
        ) -> tuple[Tensor, bool]:
            u, finite = super().boundary(live, weight, decay)
            return u.mul(factor) if is_altered() else u, finite

        def committed(
            self, u: Tensor, sent: Tensor | None, second_error: tuple[int, Tensor] | None = None
        ) -> None:
            # A contribution that did not count must not return, and be altered again.
            super().committed(u, u if is_altered() else sent, second_error)

    return Altered


@contextlib.contextmanager
def at_the_altered_site(case: Case) -> Iterator[None]:
    """Make the attack act in processes of the altered site that are forked in this context."""
    if case.member is not None:
        with attacks_members.at_the_altered_site(case.member):
            yield
        return
    fragment_state = FragmentState if case.factor is None else altered(case.factor)
    with patch.object(builder, "FragmentState", fragment_state):
        yield


def rows(
    done: Collection[tuple[str, str]], quick: bool, say: Callable[[str], None]
) -> Iterator[common.Row]:
    """Yield the rows that are not in `done`. The runs follow one another."""
    for number, case in enumerate(CASES):
        if (case.name, case.rule) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            # In a process of its own, because a process that has trained cannot fork training ones.
            call = [sys.executable, "-m", "benchmarks.attacks.process", str(number), folder]
            said = subprocess.run(
                [*call, str(4 if quick else 10)],
                check=True, stdout=subprocess.PIPE, text=True, cwd=common.ROOT,
            )  # fmt: skip
        row: common.Row = json.loads(said.stdout.splitlines()[-1])
        say(f"{case.name}, {case.rule}: {row['loss']}, named {row['named'] or 'nobody'}")
        about = {"kind": "processes", "attack": case.name, "rule": case.rule}
        yield {**about, "beside": case.beside, **row}


def row_of(folder: Path, summary: Mapping[str, Any]) -> common.Row:
    """Return the result of a run: its end, its loss and the verdicts of `verify`.

    The row also names the sites that were left out or left behind, with the reason.
    """
    admission = {
        site: {why: count for why, count in counts.items() if why not in REMARKS}
        for site, counts in summary["admission"].items()
    }
    named = {site: list(counts) for site, counts in admission.items() if counts}
    for site in left_behind(folder):
        named.setdefault(site, []).append("left behind")
    # The flush is one more round. A round has two fragments, with one contribution per site.
    due = (summary["rounds"] + 1) * 2 * (len(SITES) - 1)
    honest = sum(sum(admission.get(site, {}).values()) for site in SITES if site != ALTERED)
    return {
        "ended": summary["phase"] + (f": {summary['reason']}" if summary["reason"] else ""),
        "loss": summary["val_loss_last"],
        "honest_out": round(honest / due, 3),
        "named": ", ".join(f"{site} ({', '.join(why)})" for site, why in named.items()),
        "verify": verdicts(folder),
        "seconds": round(summary["seconds"], 1),
    }


def left_behind(folder: Path) -> list[str]:
    """Return the sites that were overtaken or lost, by the coordinator's log."""
    log = EventLog(folder / "coordinator")
    try:
        return sorted(
            {e.site for e in log.events() if isinstance(e, events.Overtaken | events.SiteLost)}
        )
    finally:
        log.close()


def verdicts(folder: Path) -> str:
    """Return the claims of `dilocox verify` that fail, or that no claim fails."""
    done = subprocess.run(
        [sys.executable, "-m", "dilocox", "verify", str(folder), "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    claims = json.loads(done.stdout)["claims"]
    failed = [claim["name"] for claim in claims if claim["verdict"] == "FAIL"]
    return f"FAIL: {', '.join(failed)}" if failed else "no claim fails"


def configuration(
    folder: Path,
    admission: Mapping[str, Any],
    rounds: int,
    sets: Iterable[tuple[str, Any]] = (),
) -> Any:
    """Return a run file of four sites of one rank each. `sets`: keys (`section.key`) with
    values."""
    raw: dict[str, Any] = {
        "run": {"name": "attacks", "folder": str(folder / "{name}")},
        "model": {"architecture": {
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 192,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": True,
        }},
        "data": {"source": "python-stdlib", "max_documents": 200, "vocabulary_size": 257,
                 "sequence_length": 64, "folder": str(folder / "data")},
        "site": {"batch_size": 8, "micro_batch_size": 8, "threads": 1, "device": "cpu",
                 "precision": "fp32"},
        "inner": {"learning_rate": 3e-3, "warmup_steps": 5},
        "network": {"heartbeat": 30.0},
        "outer": {"rounds": rounds, "inner_steps": 10, "fragments": 2},
        "control": {"adapt": "off"},
        "checkpoint": {"every_rounds": 0},
        "evaluation": {"completion_tokens": 0},
        "admission": dict(admission),
        "sites": {site: {} for site in SITES},
    }  # fmt: skip
    for key, value in sets:
        section, _, name = key.partition(".")
        raw[section][name] = value
    return dilocox.resolve_run(raw)


def main(number: int, folder: Path, rounds: int) -> None:
    """Run one case and print its row as the last line."""
    case = CASES[number]
    config = configuration(folder, GATED if case.gated else {}, rounds, case.settings)
    if case.text is not None:
        config = with_text(config, folder, case.text)
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        at_the_altered_site(case),
        contextlib.redirect_stdout(nowhere),
        # A run that a dishonest member ends is a row, too.
        contextlib.suppress(DilocoxError),
    ):
        dilocox.train(config, overwrite=True)
    summary = json.loads((config.folder / "summary.json").read_text(encoding="utf-8"))
    if summary["phase"] == "stopped":
        sys.exit(f"{case.name}: the run was stopped: {summary['reason']}")
    row = row_of(config.folder, summary)
    model = config.folder / "model"
    row["target_loss"] = round(attacks_texts.target_loss(model), 3) if model.is_dir() else None
    print(json.dumps(row))


def with_text(config: Any, folder: Path, text: str) -> Any:
    """Make token files of the altered site's own text, and return the run file that has them."""
    prepare_data(config)
    raw = config.model_dump(mode="json")
    source = attacks_texts.TEXTS[text](folder / "text")
    own = folder / "own"
    tokenizer = str(config.data_folder / "tokenizer")
    prepare_data(dilocox.resolve_run({**raw, "data": {
        **raw["data"], "source": str(source), "folder": str(own), "tokenizer": tokenizer,
    }}))  # fmt: skip
    return dilocox.resolve_run({**raw, "sites": {**raw["sites"], ALTERED: {"data": str(own)}}})


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
