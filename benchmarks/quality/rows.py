"""Entries of the quality benchmark: rivals, the paper's method, dilocox, dilocox with changes.

An entry is a method and the keys of the run file that are set for it. Other keys have the method's
defaults, so `dilocox` is dilocox with its defaults. Rounds of 100 and 500 inner steps, published
for runs of thousands of steps, are scaled to runs of hundreds of steps; an entry has both lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Value = str | int | float | bool
Settings = Mapping[str, Value]
Group = Literal["core", "muon", "ablations"]
"""What a table holds: the methods of docs/algorithm.md §5; dilocox and synchronous training with
Muon inside; dilocox with one part changed."""

MODEL: dict[str, Value] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 288,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
BATCH = 32
"""Sequences per inner step, of all sites together."""
STEP_SECONDS = 1.0
"""Declared, like the link: the benchmark has no network."""
UTILISATION = 0.9
DECLARED: Settings = {
    "control.step_seconds": STEP_SECONDS,
    "control.utilisation": UTILISATION,
}
"""With a link, all that the controller would measure elsewhere."""


@dataclass(frozen=True)
class Regime:
    """How long a run is, in inner steps per site."""

    name: str
    steps: int
    warmup_steps: int


REGIMES = {
    # 32 rounds of the paper's method, at 20 inner steps each.
    "paper": Regime("paper", 640, 40),
    # 20 tokens per parameter: 3,300 x 32 x 128 / 673,280.
    "long": Regime("long", 3300, 200),
}
LONG = "long"
LEAD = ("paper", 4, False)
"""Regime, sites, IID of what ablations, trials of short runs and --quick are trained in."""


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    `rates`: where the learning rates come from (see `quality_tuning`): "all", inner and outer are
    the best of the tuning trials; "inner", the method's own outer lr and momentum, and the best
    inner lr of the trials with these.
    """

    label: str
    method: str
    settings: Settings = field(default_factory=dict)
    tuned_as: str = ""
    rates: Literal["all", "inner"] = "inner"
    published_inner_steps: int | None = None
    target: int | None = None
    """Reduction in all that the declared link is made for."""
    group: Group = "core"
    sites: tuple[int, ...] = (2, 4)
    """With how many it is trained."""
    regimes: tuple[str, ...] = ("paper", "long")
    """In runs of which length."""

    @property
    def optimizer(self) -> str:
        """Inner optimizer, whose synchronous row is what the gap is measured against."""
        return str(self.settings.get("inner.optimizer", "adamw"))

    def with_settings(self, settings: Settings) -> Entry:
        """The same entry with more keys set."""
        return replace(self, settings={**self.settings, **settings})


OUTER_PUBLISHED: dict[str, tuple[float, float]] = {
    "diloco": (0.7, 0.9),
    "sparseloco": (1.0, 0.0),
    "dilocox-paper": (0.7, 0.9),
}
"""Outer lr and momentum as published, of each set of tuning trials that has them tuned.

Those that are not here have none (`allreduce`, `cocktailsgd`), or choose them themselves
(`dilocox`).
"""
BASELINES = {"adamw": "allreduce", "muon": "allreduce muon"}
TARGETS = (100, 500, 1000, 2750, 4000)
FAR_TARGET = 5500
"""With two sites alone: a gathered payload travels once there, where all-reduce sends as much, so
that SparseLoCo comes twice as far."""
LONG_TARGET = 3000
"""In long runs alone: there SparseLoCo, whose rounds then divide the run, comes further than the
link for 2,750x."""
MUON_TARGETS = (100, 500, 1000)
QUICK_TARGET = 500
QUICK = (
    "allreduce",
    f"dilocox {QUICK_TARGET}x",
    "dilocox-paper",
    "opendiloco",
    "intellect1",
    "cocktailsgd",
    "sparseloco",
)
DENSE: Settings = {"outer.inner_steps": 20, "outer.exchange": "reduce"}
"""Rounds of the methods that average whole vectors, and by all-reduce, as they are published."""


def uplink(target: float, sites: int, parameters: int) -> str:
    """The declared link, as the run file writes it.

    Over it, at `UTILISATION` of it, synchronous training of `parameters` fp32 values, 8(D-1)/D
    bytes of them per site and step, would take `target` times the declared step time.
    """
    needed = 8 * (sites - 1) / sites * parameters
    rate = needed * 8 / (UTILISATION * target * STEP_SECONDS)
    return f"{rate / 1e3:.3f}kbit"


def core_entries() -> list[Entry]:
    """The methods of docs/algorithm.md §5 with tuned rates, the paper's with published ones as
    well, and dilocox over several links."""
    paper: Settings = {"outer.inner_steps": 20, "compression.codec": "lowrank:32"}
    return [
        Entry("allreduce", "allreduce", DENSE, "allreduce"),
        *(dilocox(target) for target in TARGETS),
        replace(dilocox(FAR_TARGET), sites=(2,)),
        replace(dilocox(LONG_TARGET), sites=(4,), regimes=("long",)),
        *_both(Entry("dilocox-paper", "dilocox-paper", paper, published_inner_steps=125)),
        Entry("diloco", "diloco", DENSE, "diloco", "all", 500),
        Entry("opendiloco", "opendiloco", DENSE, "diloco", "all", 500),
        Entry("intellect1", "intellect1", DENSE, "diloco", "all", 100),
        Entry("cocktailsgd", "cocktailsgd", {"outer.inner_steps": 20}, "cocktailsgd"),
        Entry("sparseloco", "sparseloco", {}, "sparseloco", "all", 30),
    ]


def dilocox(target: int) -> Entry:
    """dilocox as shipped, over a declared link; tuned at one link for all of them."""
    return Entry(f"dilocox {target}x", "dilocox", DECLARED, "dilocox", target=target)


def muon_entries() -> list[Entry]:
    """dilocox as shipped with Muon inside, over declared links, and synchronous training with it:
    what the gaps of all rows with Muon are measured against."""
    muon: Settings = {"inner.optimizer": "muon"}
    known = [Entry("allreduce muon", "allreduce", {**DENSE, **muon}, "allreduce muon")]
    for target in MUON_TARGETS:
        made = dilocox(target).with_settings(muon)
        known.append(replace(made, label=f"dilocox muon {target}x", tuned_as="dilocox muon"))
    return [replace(entry, group="muon") for entry in known]


def _both(entry: Entry) -> list[Entry]:
    """With outer lr and momentum tuned, and as published."""
    entry = replace(entry, tuned_as=entry.tuned_as or entry.method)
    return [
        replace(entry, rates="all"),
        replace(entry, label=f"{entry.label} published"),
    ]


FIXED: Settings = {
    "control.adapt": "off",
    "outer.inner_steps": 5,
    "outer.fragments": 4,
    "outer.delay": 1,
    "outer.learning_rate": 0.8,
    "outer.momentum": 0.5,
    "compression.codec": "topk:82",
    "compression.moments": False,
}
"""What ablations change one part of: short rounds, four staggered fragments, top-k of 2 %."""

ABLATIONS: dict[str, Settings] = {
    "fixed": {},
    "no overlap": {"outer.overlap": "none", "outer.delay": 0},
    "keep, a round late": {"outer.delay": 5},
    "keep .65, a round late": {"outer.delay": 5, "outer.keep": 0.65},
    "naive": {"outer.overlap": "naive", "outer.delay": 5},
    "eager": {"outer.overlap": "eager", "outer.delay": 5},
    "one fragment": {"outer.fragments": 1, "outer.delay": 5},
    "codec none": {"compression.codec": "none"},
    "codec int4": {"compression.codec": "int4"},
    "codec int2": {"compression.codec": "int2"},
    "codec topk:164": {"compression.codec": "topk:164"},
    "codec topk:41": {"compression.codec": "topk:41"},
    "codec lowrank:8": {"compression.codec": "lowrank:8"},
    "codec cocktail": {"compression.codec": "cocktail"},
    "beta .95": {"compression.residual_decay": 0.95},
    "beta .8": {"compression.residual_decay": 0.8},
    "residual in view .2": {"compression.residual_view": 0.2},
    "moments shared": {"compression.moments": True},
    "int4, no error feedback": {
        "compression.codec": "int4",
        "compression.error_feedback": False,
    },
    "H 2": {"outer.inner_steps": 2, "outer.fragments": 2},
    "H 10": {"outer.inner_steps": 10, "outer.delay": 2},
    "H 20": {"outer.inner_steps": 20, "outer.delay": 5},
    "outer .7/.9": {"outer.learning_rate": 0.7, "outer.momentum": 0.9},
    "outer 1/0": {"outer.learning_rate": 1.0, "outer.momentum": 0.0},
    "muon": {"inner.optimizer": "muon"},
    "muon, codec none": {"inner.optimizer": "muon", "compression.codec": "none"},
    "muon, codec int4": {"inner.optimizer": "muon", "compression.codec": "int4"},
}


def ablation_entries() -> list[Entry]:
    """dilocox with one part changed."""
    entries = []
    for name, changed in ABLATIONS.items():
        tuned_as = "allreduce muon" if "inner.optimizer" in changed else "dilocox"
        settings = {**FIXED, **changed}
        entries.append(Entry(f"dilocox {name}", "dilocox", settings, tuned_as))
    return [replace(entry, group="ablations") for entry in entries]


def all_entries() -> list[Entry]:
    """What the full benchmark trains, what is quoted most first."""
    return core_entries() + muon_entries() + ablation_entries()


def tuning_entries() -> dict[str, Entry]:
    """What is trained in the trials of each `tuned_as`. Raises `KeyError` for none that has it."""
    entries = {entry.label: entry for entry in core_entries() + muon_entries()}
    chosen = {
        "allreduce": "allreduce",
        "dilocox": f"dilocox {QUICK_TARGET}x",
        "dilocox-paper": "dilocox-paper",
        "diloco": "diloco",
        "cocktailsgd": "cocktailsgd",
        "sparseloco": "sparseloco",
        "allreduce muon": "allreduce muon",
        "dilocox muon": f"dilocox muon {QUICK_TARGET}x",
    }
    return {tuned_as: entries[label] for tuned_as, label in chosen.items()}


def tried_entry(text: str) -> Entry:
    """An entry from `key=value ...`, keys of the run file, `method=` and `target=` among them.

    Values are integers, numbers, `true` and `false`, else text.
    """
    settings: dict[str, Value] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r}: write it as section.key=value")
        settings[key] = _value(value)
    method = str(settings.pop("method", "dilocox"))
    target = settings.pop("target", None)
    tuned_as = "dilocox" if method == "dilocox" else method
    made = Entry(text, method, settings, tuned_as, group="ablations")
    if target is None:
        return made
    return replace(made, settings={**DECLARED, **settings}, target=int(target))


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
