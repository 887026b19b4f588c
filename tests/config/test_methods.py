"""Every method is a composition of the same parts, with the numbers of docs/algorithm.md §5."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.methods import METHODS
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import ConfigError

pytestmark = pytest.mark.waits


def resolve(**outer: Any) -> RunConfig:
    return resolve_run({"model": {"path": "x"}, "outer": outer, "sites": {"a": {}, "b": {}}})


@pytest.mark.parametrize(
    ("method", "steps", "overlap", "codec", "feedback", "rates"),
    [
        ("diloco", 500, "none", "none", False, (0.7, 0.9)),
        ("opendiloco", 500, "none", "fp16", False, (0.7, 0.9)),
        ("intellect1", 100, "none", "int8", False, (0.7, 0.9)),
        ("sparseloco", 30, "none", "topk:64", True, (1.0, 0.0)),
        ("dilocox-paper", 125, "naive", "lowrank:64", True, (0.7, 0.9)),
        ("dilocox", 20, "keep", "int4", True, (0.8, 0.5)),
        # Gradients: no outer step.
        ("cocktailsgd", 10, "none", "cocktail", True, (1.0, 0.0)),
        # Plain synchronous data parallel: its outer step is the identity.
        ("allreduce", 10, "none", "none", False, (1.0, 0.0)),
    ],
)
def test_defaults_are_the_published_ones(
    method: str, steps: int, overlap: str, codec: str, feedback: bool, rates: tuple[float, float]
) -> None:
    config = resolve(method=method)
    outer = config.outer
    assert (outer.inner_steps, outer.overlap) == (steps, overlap)
    assert (outer.learning_rate, outer.momentum) == rates
    assert config.compression.codec == codec
    assert config.compression.error_feedback is feedback
    if overlap != "keep":
        assert (outer.slots, outer.fragments) == (1, 1)
    adapts = {"dilocox": "link", "dilocox-paper": "effective-rank"}
    assert config.control.adapt == adapts.get(method, "off")
    assert config.compression.residual_decay == (0.95 if method == "sparseloco" else 1.0)


def test_the_table_above_holds_every_method() -> None:
    assert set(METHODS) == {
        "allreduce", "cocktailsgd", "diloco", "opendiloco", "intellect1", "sparseloco",
        "dilocox-paper", "dilocox",
    }  # fmt: skip


def test_gradients_are_used_at_once_or_a_step_late() -> None:
    for method, delay, exchange in (("allreduce", 0, "gather"), ("cocktailsgd", 1, "reduce")):
        # What only pseudo-gradients have is of no effect: a run file needs no rewriting.
        config = resolve(method=method, fragments=2, inner_steps=7)
        assert config.exchanges_gradients
        assert config.gradient_delay == delay
        assert config.outer.exchange == exchange
    assert resolve(method="cocktailsgd", delay=0).gradient_delay == 0
    assert not any(resolve(method=name).exchanges_gradients for name in ("diloco", "sparseloco"))


@pytest.mark.parametrize(
    "changes",
    [
        {"outer": {"overlap": "none"}},
        {"outer": {"method": "dilocox-paper"}, "compression": {"codec": "int8"}},
        {"outer": {"method": "diloco"}},
    ],
)
def test_nothing_adapts_where_the_run_file_leaves_no_room(changes: dict[str, Any]) -> None:
    raw = {"model": {"path": "x"}, "sites": {"a": {}}, **changes}
    assert resolve_run(raw).control.adapt == "off"


def test_dilocox_staggers_its_fragments() -> None:
    outer = resolve().outer
    assert (outer.method, outer.fragments, outer.slots) == ("dilocox", 4, 20)
    # The time between the boundaries of two fragments: what a fully used link allows.
    assert outer.delay == 5


def test_what_a_run_file_says_wins() -> None:
    config = resolve_run(
        {
            "model": {"path": "x"},
            "outer": {"method": "diloco", "inner_steps": 30, "momentum": 0.3},
            "compression": {"codec": "int4"},
            "sites": {"a": {}},
        }
    )
    assert config.outer.inner_steps == 30
    assert config.outer.momentum == 0.3
    assert config.outer.learning_rate == 0.7
    assert (config.compression.codec, config.compression.error_feedback) == ("int4", False)


@pytest.mark.parametrize("overlap", ["naive", "eager"])
def test_whole_round_rules_land_a_round_later(overlap: str) -> None:
    outer = resolve(method="diloco", overlap=overlap).outer
    assert outer.delay == outer.slots
    staggered = resolve(overlap=overlap, inner_steps=12, fragments=3).outer
    assert staggered.delay == staggered.slots == 12


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    method=st.sampled_from(sorted(METHODS)),
    overlap=st.sampled_from([None, "none", "naive", "keep", "eager"]),
    steps=st.integers(1, 600),
    fragments=st.one_of(st.none(), st.integers(1, 8)),
)
def test_any_steps_overlap_and_fragments_resolve(
    method: str, overlap: str | None, steps: int, fragments: int | None
) -> None:
    given_keys: dict[str, Any] = {"method": method, "inner_steps": steps}
    if overlap is not None:
        given_keys["overlap"] = overlap
    if fragments is not None:
        given_keys["fragments"] = min(fragments, steps)
    if METHODS[method].exchanges_gradients and overlap not in (None, "none"):
        with pytest.raises(ConfigError, match="exchanges gradients"):
            resolve(**given_keys)
        return
    outer = resolve(**given_keys).outer
    assert outer.inner_steps == steps
    assert outer.inner_steps % outer.slots == 0
    if METHODS[method].exchanges_gradients:
        return
    assert outer.fragments <= outer.slots
    assert (outer.delay == 0) == (outer.overlap == "none")
    assert outer.delay <= outer.slots
