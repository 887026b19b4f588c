"""Real runs of the attacks benchmark: a coordinator and four sites, one of them altered.

What is altered is the process of the site `rome`, by a subclass that exists here only.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import common
from torch import Tensor

import dilocox
from dilocox import assembly
from dilocox.outer.state import PieceState

SITES = ("paris", "lyon", "oslo", "rome")
ALTERED = "rome"
GATED = {"aggregation": "clip", "gate": True}
CASES: tuple[tuple[str, float | None, str, dict[str, Any]], ...] = (
    ("real: none", None, "mean", {}),
    ("real: sign flip x10", -10.0, "mean", {}),
    ("real: sign flip x10", -10.0, "clip+gate", GATED),
    ("real: zero", 0.0, "clip+gate", GATED),
)
"""Name, what the altered site multiplies its contribution by, rule, `[admission]`."""


def altered(factor: float) -> type[PieceState]:
    """A fragment state whose contributions are multiplied at the altered site."""

    class Altered(PieceState):
        def boundary(
            self, live: Mapping[str, Tensor], weight: float, decay: float
        ) -> tuple[Tensor, bool]:
            u, finite = super().boundary(live, weight, decay)
            return u.mul(factor) if is_altered() else u, finite

        def committed(
            self, u: Tensor, sent: Tensor | None, second_error: tuple[int, Tensor] | None = None
        ) -> None:
            # What did not count must not come back and be altered again.
            super().committed(u, u if is_altered() else sent, second_error)

    return Altered


def is_altered() -> bool:
    """This process is a rank of the altered site."""
    return multiprocessing.current_process().name.startswith(f"{ALTERED}-")


@contextlib.contextmanager
def at_the_altered_site(factor: float | None) -> Iterator[None]:
    """Processes that are forked meanwhile have the altered site among them."""
    honest = assembly.PieceState
    if factor is not None:
        assembly.PieceState = altered(factor)  # type: ignore[misc]
    try:
        yield
    finally:
        assembly.PieceState = honest  # type: ignore[misc]


def rows(
    done: Collection[tuple[str, str]], quick: bool, say: Callable[[str], None]
) -> Iterator[common.Row]:
    """The rows that are not in `done`, run one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, _, rule, _) in enumerate(CASES):
            if (name, rule) in done:
                continue
            # In a process of its own: one that has trained cannot fork others that train.
            call = [sys.executable, __file__, str(number), folder, str(4 if quick else 10)]
            said = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True)
            summary = json.loads(said.stdout.splitlines()[-1])
            named = {site: counts for site, counts in summary["admission"].items()
                     if set(counts) - {"large", "small", "against", "copied"}}  # fmt: skip
            loss = summary["val_loss_last"]
            say(f"{name}, {rule}: {loss}, named {', '.join(named) or 'nobody'}")
            yield {
                "kind": "processes",
                "attack": name,
                "rule": rule,
                "loss": loss,
                "named": ", ".join(f"{site} ({', '.join(why)})" for site, why in named.items()),
            }


def configuration(folder: Path, admission: Mapping[str, Any], rounds: int) -> Any:
    """Four sites of one rank each."""
    return dilocox.resolve_run({
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
    })  # fmt: skip


def main(number: int, folder: Path, rounds: int) -> None:
    """Run one case and print its summary as the last line."""
    _, factor, _, admission = CASES[number]
    config = configuration(folder, admission, rounds)
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        at_the_altered_site(factor),
        contextlib.redirect_stdout(nowhere),
    ):
        dilocox.train(config, overwrite=True)
    summary = json.loads((config.folder / "summary.json").read_text(encoding="utf-8"))
    print(json.dumps(summary))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
