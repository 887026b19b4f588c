"""Invariants 1, 2, 3 and 6 of the algorithm, with real states, codecs and averages."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from dilocox.compression import CODECS
from dilocox.outer.fragment_state import FragmentState
from tests.support.convex_problems import linear_site, loss_of, noisy_site
from tests.support.simulator import Settings, Simulation

pytestmark = pytest.mark.waits

# overlap, kappa, slots, fragments, delay
RULES = [
    ("none", 1.0, 1, 1, 0),
    ("none", 1.0, 4, 3, 0),
    ("naive", 1.0, 1, 1, 1),
    ("naive", 1.0, 4, 3, 4),
    ("keep", 1.0, 4, 3, 1),
    ("keep", 0.65, 5, 3, 2),
    ("keep", 0.0, 2, 2, 2),
    ("eager", 1.0, 2, 2, 2),
]

EXCHANGES = [
    *product([*CODECS, "topk:128", "top1:64", "cocktail"], ("gather", "reduce")),
    ("lowrank:2", "gather"),
]
"""Every codec in every mode that it can be exchanged in."""


def settings_of(rule: tuple[str, float, int, int, int], **more: object) -> Settings:
    overlap, keep, slots, fragments, delay = rule
    return Settings(
        overlap=overlap,
        keep=keep,
        slots=slots,
        fragments=fragments,
        delay=delay,
        **more,  # type: ignore[arg-type]
    )


def residual_of(state: FragmentState) -> Tensor:
    assert state.residual is not None
    return state.residual.double()


def simulation(settings: Settings, sites: int) -> Simulation:
    return Simulation(settings, {f"site{number}": noisy_site(number) for number in range(sites)})


def test_hand_trace() -> None:
    """Worked by hand: two sites, linear 2 -> 1, H=3, Nesterov with rate 1 and momentum .9."""
    data = {
        "a": (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1.0, 2.0])),
        "b": (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([2.0, 3.0])),
    }
    losses: dict[str, list[float]] = {"a": [], "b": []}
    sites = {
        name: linear_site([2.0, 1.0], 1.0, *data[name], rate=0.1, losses=losses[name])
        for name in data
    }
    run = Simulation(Settings(steps_per_slot=3, momentum=0.9), sites)
    anchors = []
    for _ in range(2):
        run.run(1)
        anchor = sites["a"].states[0].layout.views(sites["a"].states[0].anchor)
        anchors.append([*anchor["weight"].tolist(), anchor["bias"].item()])
        assert torch.equal(sites["a"].live["weight"], anchor["weight"])
    for name, site in sites.items():
        losses[name].append(loss_of(site.live, *data[name]))
    assert anchors[0] == pytest.approx([1.5345, 1.0494, 0.5839], abs=1e-6)
    assert anchors[1] == pytest.approx([1.26282, 1.247008, 0.509828], abs=1e-6)
    expected_a = [1.0, 0.49, 0.2401, 0.207544, 0.122906, 0.077404, 0.312245]
    expected_b = [1.0, 0.81, 0.6561, 0.940944, 0.637504, 0.455295, 0.798574]
    assert losses["a"] == pytest.approx(expected_a, abs=1e-6)
    assert losses["b"] == pytest.approx(expected_b, abs=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_anchors_are_equal_to_the_bit_at_all_sites(rule: tuple[str, float, int, int, int]) -> None:
    """Every landing compares the digests; sites' own parameters differ under overlap."""
    for name, mode in EXCHANGES:
        settings = settings_of(
            rule, codec=name, exchange=mode, error_feedback=True, learning_rate=0.8, momentum=0.5
        )
        run = simulation(settings, sites=3)
        start = [state.anchor.clone() for state in run.sites["site0"].states]
        run.run(4)
        assert run.landings >= 3 * settings.fragments
        for state, before in zip(run.sites["site0"].states, start, strict=True):
            assert not torch.equal(state.anchor, before)


@pytest.mark.parametrize(("name", "mode"), EXCHANGES)
@pytest.mark.parametrize("rule", [RULES[1], RULES[3], RULES[5], RULES[7]], ids=str)
def test_error_feedback_identity(
    rule: tuple[str, float, int, int, int], name: str, mode: str
) -> None:
    """Sum of W·Δ = sum of w·δ - residuals - what is in the air; weights and numbers of steps vary,
    sites are left out.

    The δ are summed from the inner displacements, so this also shows that no jump is ever
    counted as one.
    """
    settings = settings_of(
        rule,
        codec=name,
        exchange=mode,
        error_feedback=True,
        learning_rate=0.8,
        momentum=0.5,
        weights=lambda round_, site: 0.5 + 0.25 * ((round_ + int(site[-1])) % 4),
        counted=lambda round_, site: site != f"site{round_ % 4}",
        paces={"site1": 400, "site2": 750},
    )
    run = simulation(settings, sites=3)
    run.run(7)
    flying = [torch.zeros_like(each) for each in run.applied]
    for (_, fragment), (outcomes, counted, total) in run._flying.items():
        landed = outcomes[counted[0]].average
        assert landed is not None
        flying[fragment] += total * landed.double()
    for fragment, applied in enumerate(run.applied):
        residuals = torch.zeros_like(applied)
        for site in run.sites.values():
            residuals += residual_of(site.states[fragment])
        if name not in ("none", "fp16", "bf16"):
            assert residuals.abs().max() > 1e-4
        expected = run.contributed[fragment] - residuals - flying[fragment]
        assert expected.abs().max() > 0.1
        assert torch.allclose(applied, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("mode", ["gather", "reduce"])
def test_second_error_would_be_missed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity fails by far if the owner forgets the second quantisation (`reduce` only)."""
    whole = FragmentState.committed

    def forgetful(state: FragmentState, u: Tensor, sent: Tensor | None, _: object) -> None:
        whole(state, u, sent)

    monkeypatch.setattr(FragmentState, "committed", forgetful)
    run = simulation(Settings(codec="int4", exchange=mode, error_feedback=True), sites=3)
    run.run(3)
    expected = run.contributed[0]
    for site in run.sites.values():
        expected = expected - residual_of(site.states[0])
    gap = float((run.applied[0] - expected).abs().max())
    assert (gap > 1e-3) == (mode == "reduce")


def test_left_out_site_loses_nothing() -> None:
    """Without compression, what a left-out site holds back arrives whole one round later."""
    settings = Settings(
        error_feedback=True, counted=lambda round_, site: (round_, site) != (0, "site1")
    )
    run = simulation(settings, sites=2)
    run.run(2)
    assert torch.allclose(run.applied[0], run.contributed[0], rtol=0, atol=1e-5)
    for site in run.sites.values():
        assert not residual_of(site.states[0]).any()


def test_empty_contribution_set_leaves_the_anchor() -> None:
    settings = Settings(error_feedback=True, momentum=0.9, counted=lambda round_, site: round_ > 0)
    run = simulation(settings, sites=2)
    digest = run.sites["site0"].states[0].digest()
    run.run(1)
    assert run.sites["site0"].states[0].digest() == digest
    run.run(1)
    assert torch.allclose(run.applied[0], run.contributed[0], rtol=0, atol=1e-5)


def test_no_local_steps_is_synchronous_data_parallel() -> None:
    run = simulation(Settings(weights=lambda round_, site: 0.5 + int(site[-1])), sites=2)
    run.run(12)
    weights = [0.25, 0.75]
    plain = noisy_site(0).live
    for step in range(12):
        moved = {name: torch.zeros_like(tensor) for name, tensor in plain.items()}
        for number, weight in enumerate(weights):
            trial = {name: tensor.clone() for name, tensor in plain.items()}
            noisy_site(number).inner_step(trial, step)
            for name in plain:
                moved[name] += weight * (trial[name] - plain[name])
        for name in plain:
            plain[name] += moved[name]
    for name, tensor in run.sites["site0"].live.items():
        assert torch.allclose(tensor, plain[name], rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    "rule", [RULES[0], RULES[1], RULES[4], ("keep", 1.0, 3, 2, 3), RULES[7]], ids=str
)
def test_one_site_is_plain_training(rule: tuple[str, float, int, int, int]) -> None:
    """D=1, rate 1, no momentum: without overlap, with `keep` (kappa 1) and with `eager`, too."""
    settings = settings_of(rule, steps_per_slot=2)
    run = simulation(settings, sites=1)
    run.run(6)
    plain = noisy_site(0)
    for step in range(6 * settings.slots * 2):
        plain.inner_step(plain.live, step)
    for name, tensor in run.sites["site0"].live.items():
        assert torch.allclose(tensor, plain.live[name], rtol=0, atol=5e-6)


def test_keep_a_whole_round_late_leaves_the_mean_of_the_sites() -> None:
    """kappa 1, rate 1, no momentum: a landing moves the sites together, not their mean."""
    run = simulation(Settings(overlap="keep", slots=3, delay=3), sites=3)
    run.run(6)
    assert len(run.jumps) == 5
    for before, after in run.jumps:
        assert torch.allclose(before, after, rtol=0, atol=2e-6)


def test_eager_site_alone_sees_the_anchor_that_comes() -> None:
    """D=1: the view after one landing is the anchor after the next, momentum included."""
    settings = Settings(overlap="eager", delay=1, learning_rate=0.7, momentum=0.9)
    run = simulation(settings, sites=1)
    state = run.sites["site0"].states[0]
    run.run(2)
    for _ in range(6):
        view = state.layout.pack(run.sites["site0"].live)
        run.run(1)
        assert torch.allclose(state.anchor, view, rtol=0, atol=5e-6)


@pytest.mark.parametrize("view", [0.0, 0.3])
@pytest.mark.parametrize("rule", [RULES[1], RULES[3], RULES[5], RULES[7]], ids=str)
def test_flush_brings_everything_home(rule: tuple[str, float, int, int, int], view: float) -> None:
    """After the flush only the 8-bit error of the last contribution is missing, and no site trains
    on a residual any more."""
    settings = settings_of(
        rule, codec="int4", error_feedback=True, residual_decay=1.0, residual_view=view
    )
    run = simulation(settings, sites=2)
    run.run(5)
    run.flush()
    for fragment, applied in enumerate(run.applied):
        gap = (applied - run.contributed[fragment]).abs().max()
        assert 0 < gap < 0.02
        for site in run.sites.values():
            anchor = site.states[fragment].anchor
            assert torch.equal(site.states[fragment].layout.pack(site.live), anchor)
