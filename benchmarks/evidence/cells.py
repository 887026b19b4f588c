"""Cells of the evidence benchmark: which runs answer which question (PROTOCOL.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.quality.data import SEQUENCE_LENGTH
from benchmarks.quality.rows import BATCH, DENSE, MODEL, Entry, Settings, dilocox

Question = Literal["tokens", "ladder", "unseen"]
Source = Literal["source", "mixed", "perl"]
"""The text: Python's sources with WikiText-2, on which dilocox was tuned, or an unseen text."""
RateRule = Literal["full", "down", "same", "frozen"]
"""How a cell's inner learning rates are found: see `benchmarks.evidence.rates`."""

TOKENS_PER_STEP = BATCH * SEQUENCE_LENGTH
SEEDS = (0, 1, 2)
UNSEEN_STEPS = 640
WARMUP = 16
"""A run warms up in one of this number of its steps."""

SIZES: dict[str, dict[str, int]] = {
    "0.18M": {"hidden_size": 64, "intermediate_size": 144, "heads": 2},
    "0.38M": {"hidden_size": 96, "intermediate_size": 208, "heads": 4},
    "0.67M": {"hidden_size": 128, "intermediate_size": 288, "heads": 4},
    "1.5M": {"hidden_size": 192, "intermediate_size": 432, "heads": 4},
    "2.6M": {"hidden_size": 256, "intermediate_size": 576, "heads": 4},
}
"""Widths of the ladder, by number of parameters. All sizes have four layers."""
SHAPES: dict[str, Settings] = {
    "qwen3": {},
    "llama": {"model_type": "llama"},
    "gemma": {"model_type": "gemma3_text", "query_pre_attn_scalar": 32, "sliding_window": 64},
    "granite": {"model_type": "granite"},
}
"""Architectures of 0.67M parameters; dilocox was tuned on the first one."""
SHORT, MIDDLE, LONG, LONGEST = 4, 20, 100, 400
"""Tokens per parameter."""


@dataclass(frozen=True)
class Cell:
    """One setting in which methods are compared."""

    question: Question
    source: Source
    size: str
    shape: str = "qwen3"
    sites: int = 4
    per_parameter: int | None = None
    """Tokens per parameter. None: `UNSEEN_STEPS` steps."""
    same_text: bool = False
    """Whether all sites train on the whole text. False: each site has contiguous parts."""
    rule: RateRule = "full"
    starts_at: Cell | None = None
    """The cell whose best rates are the start of this cell's trials."""

    @property
    def architecture(self) -> dict[str, object]:
        """The section `[model.architecture]` of the run file."""
        width = SIZES[self.size]
        heads = width["heads"]
        made: dict[str, object] = {
            **MODEL,
            "hidden_size": width["hidden_size"],
            "intermediate_size": width["intermediate_size"],
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": width["hidden_size"] // heads,
        }
        return {**made, **SHAPES[self.shape]}

    def steps(self, parameters: int) -> int:
        """Return the number of inner steps of a run with this number of parameters."""
        if self.per_parameter is None:
            return UNSEEN_STEPS
        return round(self.per_parameter * parameters / TOKENS_PER_STEP)

    @property
    def key(self) -> dict[str, object]:
        """The fields of a row that name the cell."""
        return {
            "question": self.question,
            "source": self.source,
            "size": self.size,
            "shape": self.shape,
            "sites": self.sites,
            "per_parameter": self.per_parameter,
            "same_text": self.same_text,
        }

    def __str__(self) -> str:
        length = f"{self.per_parameter} tokens per parameter" if self.per_parameter else "640 steps"
        kind = "same text" if self.same_text else "own text"
        return f"{self.size} {self.shape}, {self.source}, {self.sites} sites, {kind}, {length}"


def entries() -> dict[str, Entry]:
    """Return the methods by label. All have the settings of the quality benchmark."""
    known = [
        Entry("allreduce", "allreduce", DENSE, "allreduce"),
        Entry("diloco", "diloco", DENSE, "diloco", "all", 500),
        dilocox(100),
        dilocox(1000),
        Entry("sparseloco", "sparseloco", {}, "sparseloco", "all", 30),
    ]
    return {entry.label: entry for entry in known}


BASELINE = "allreduce"
DILOCOX = ("dilocox 100x", "dilocox 1000x")
ALL = (BASELINE, *DILOCOX, "diloco", "sparseloco")
LADDER = (BASELINE, *DILOCOX, "diloco")
FEW = (BASELINE, *DILOCOX)


@dataclass(frozen=True)
class Group:
    """A cell, the methods that are trained there, and their seeds."""

    cell: Cell
    labels: tuple[str, ...]
    seeds: tuple[int, ...]


def groups() -> list[Group]:
    """Return all groups, in the order in which they are trained."""
    return [*_unseen(), *_tokens(), *_ladder()]


def _unseen() -> Iterable[Group]:
    mixed = Cell("unseen", "mixed", "0.67M", rule="frozen")
    yield Group(mixed, ALL, SEEDS)
    yield Group(replace(mixed, same_text=True), FEW, SEEDS)
    yield Group(replace(mixed, source="perl"), ALL, SEEDS)
    for shape in ("llama", "gemma", "granite"):
        yield Group(replace(mixed, shape=shape), FEW, SEEDS[:1])
    yield Group(replace(mixed, sites=2), FEW, SEEDS)
    yield Group(replace(mixed, source="perl", sites=2), FEW, SEEDS[:1])
    for shape in ("llama", "gemma", "granite"):
        yield Group(replace(mixed, shape=shape, sites=2), FEW, SEEDS[:1])


def _lengths(source: Source) -> tuple[Cell, Cell, Cell, Cell]:
    short = Cell("tokens", source, "0.18M", per_parameter=SHORT)
    middle = replace(short, per_parameter=MIDDLE, starts_at=short)
    long = replace(short, per_parameter=LONG, rule="down", starts_at=middle)
    return short, middle, long, replace(long, per_parameter=LONGEST, rule="same", starts_at=long)


def _tokens() -> Iterable[Group]:
    mixed, source = _lengths("mixed"), _lengths("source")
    for at in range(3):
        yield Group(mixed[at], ALL, SEEDS[:2])
        yield Group(source[at], ALL, SEEDS[:2])
    yield Group(mixed[3], ALL, SEEDS[:1])


def _ladder() -> Iterable[Group]:
    before = _lengths("source")[1]
    for size, rule in (("0.38M", "full"), ("0.67M", "down"), ("1.5M", "same"), ("2.6M", "same")):
        cell = Cell(
            "ladder",
            "source",
            size,
            per_parameter=MIDDLE,
            rule=rule,  # type: ignore[arg-type]
            starts_at=before,
        )
        yield Group(cell, LADDER, SEEDS[:2] if size in ("0.38M", "0.67M") else SEEDS[:1])
        before = cell
