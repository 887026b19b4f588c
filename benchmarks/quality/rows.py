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
"""Table of an entry: the methods of docs/algorithm.md §5; dilocox and synchronous training with
Muon inside; or dilocox with one part changed."""

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
"""Declared time of a step, in seconds. The benchmark has no network."""
UTILISATION = 0.9
DECLARED: Settings = {
    "control.step_seconds": STEP_SECONDS,
    "control.utilisation": UTILISATION,
}
"""Together with a link these are all values that the controller would otherwise measure."""


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
"""Regime, sites and IID of ablations, of trials of short runs and of --quick."""


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    `rates` says where the learning rates come from (see `benchmarks.quality.tuning`). "all": inner
    and outer rates are the best of the tuning trials. "inner": the outer rate and momentum are the
    method's own, the inner rate is the best of the trials with them.
    """

    label: str
    method: str
    settings: Settings = field(default_factory=dict)
    tuned_as: str = ""
    rates: Literal["all", "inner"] = "inner"
    published_inner_steps: int | None = None
    target: int | None = None
    """Reduction in all for which the declared link is made."""
    group: Group = "core"
    sites: tuple[int, ...] = (2, 4)
    """Numbers of sites with which the entry is trained."""
    regimes: tuple[str, ...] = ("paper", "long")
    """Lengths of the runs of the entry."""

    @property
    def optimizer(self) -> str:
        """Inner optimizer. The gap is relative to the synchronous row of the same optimizer."""
        return str(self.settings.get("inner.optimizer", "adamw"))

    def with_settings(self, settings: Settings) -> Entry:
        """Return the same entry with more keys set."""
        return replace(self, settings={**self.settings, **settings})


OUTER_PUBLISHED: dict[str, tuple[float, float]] = {
    "diloco": (0.7, 0.9),
    "sparseloco": (1.0, 0.0),
    "dilocox-paper": (0.7, 0.9),
}
"""Published outer learning rate and momentum, by the trials (`tuned_as`) that tune them.

Methods that are missing have none (`allreduce`, `cocktailsgd`) or choose them (`dilocox`).
"""
BASELINES = {"adamw": "allreduce", "muon": "allreduce muon"}
TARGETS = (100, 500, 1000, 2750, 4000)
FAR_TARGET = 5500
"""Target with two sites alone. There `gather` sends a payload once, and all-reduce sends as much.
So SparseLoCo reaches twice the reduction."""
LONG_TARGET = 3000
"""Target in long runs alone. There SparseLoCo's rounds divide the run, and it reaches a larger
reduction than the link for 2,750x."""
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
"""Rounds of the methods that average whole vectors by all-reduce, as published."""


def uplink(target: float, sites: int, parameters: int) -> str:
    """Return the declared link, as the run file writes it.

    Synchronous training sends 8(D-1)/D bytes per parameter, site and step. At `UTILISATION` of the
    link this takes `target` times the declared step time.
    """
    needed = 8 * (sites - 1) / sites * parameters
    rate = needed * 8 / (UTILISATION * target * STEP_SECONDS)
    return f"{rate / 1e3:.3f}kbit"


def core_entries() -> list[Entry]:
    """Return the methods of docs/algorithm.md §5 with tuned rates, and dilocox over several links.

    The paper's method is there with published rates as well.
    """
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
    """Return dilocox as shipped over a declared link. The rates of all links were tuned at one
    link."""
    return Entry(f"dilocox {target}x", "dilocox", DECLARED, "dilocox", target=target)


def muon_entries() -> list[Entry]:
    """Return dilocox as shipped with Muon inside, over declared links, and synchronous Muon.

    All gaps of rows with Muon are relative to the synchronous row.
    """
    muon: Settings = {"inner.optimizer": "muon"}
    known = [Entry("allreduce muon", "allreduce", {**DENSE, **muon}, "allreduce muon")]
    for target in MUON_TARGETS:
        made = dilocox(target).with_settings(muon)
        known.append(replace(made, label=f"dilocox muon {target}x", tuned_as="dilocox muon"))
    return [replace(entry, group="muon") for entry in known]


def _both(entry: Entry) -> list[Entry]:
    """Return the entry with tuned outer rate and momentum, and with the published ones."""
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
"""The base of the ablations: short rounds, four staggered fragments, top-k of 2 %."""

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
    """Return dilocox with one part changed, once per ablation."""
    entries = []
    for name, changed in ABLATIONS.items():
        tuned_as = "allreduce muon" if "inner.optimizer" in changed else "dilocox"
        settings = {**FIXED, **changed}
        entries.append(Entry(f"dilocox {name}", "dilocox", settings, tuned_as))
    return [replace(entry, group="ablations") for entry in entries]


def all_entries() -> list[Entry]:
    """Return all entries of the full benchmark; the most quoted ones come first."""
    return core_entries() + muon_entries() + ablation_entries()


def tuning_entries() -> dict[str, Entry]:
    """Return the entry of the trials of each `tuned_as`."""
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
    """Return the entry of `key=value ...`: keys of the run file, `method` and `target`.

    Values are read as integers, numbers, `true` or `false`, or else as text. Learning rates come
    from the trials of the same method and inner optimizer.

    Raises `ValueError` if a word is no `key=value`, or if `target` is no whole number.
    """
    settings: dict[str, Value] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r}: write it as section.key=value")
        settings[key] = _value(value)
    method = str(settings.pop("method", "dilocox"))
    target = settings.pop("target", None)
    if target is not None and (isinstance(target, bool) or not isinstance(target, int)):
        raise ValueError(f"target={target}: write a whole number")
    like = {entry.method: entry.tuned_as for entry in core_entries()}
    tuned_as = like.get(method, method)
    if settings.get("inner.optimizer") == "muon" and f"{tuned_as} muon" in tuning_entries():
        tuned_as += " muon"
    made = Entry(text, method, settings, tuned_as, group="ablations")
    if target is None:
        return made
    return replace(made, settings={**DECLARED, **settings}, target=target)


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
