"""Clipping, from what ranks find to the average: who says nothing takes nothing from the others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dilocox.compression import compressor
from dilocox.coordinator.protocol.messages import ExchangeKey
from dilocox.coordinator.protocol.verdicts import WHOLE
from dilocox.coordinator.server.contribution_rules import Evidence, Judgement, judge
from dilocox.outer.aggregation import aggregate
from dilocox.outer.contribution import Contribution
from dilocox.outer.contribution_set import Weighing
from dilocox.outer.layout import Layout
from dilocox.outer.scoring import examine

pytestmark = pytest.mark.waits

LAYOUT = Layout.of({"matrix": (16, 16), "norm": (16,)})


def drawn(seed: int, layout: Layout = LAYOUT) -> Tensor:
    """A contribution of normal values, flat fp32 [length]."""
    draw = torch.Generator().manual_seed(seed)
    sent = torch.zeros(layout.length)
    for view in layout.views(sent).values():
        view.copy_(torch.randn(view.shape, generator=draw))
    return sent


def clipped(
    sent: dict[str, Tensor], withdrawn: Sequence[str] = (), training: bool = True
) -> tuple[Judgement, Tensor | None]:
    """What every site's rank, the coordinator, and the average make of `sent`."""
    weights = dict.fromkeys(sent, 1.0)
    found = examine(sent, weights, LAYOUT.offsets, "clip")
    whole = [site for site in sent if site not in withdrawn]
    decided = judge(Evidence(whole, [[found] * len(sent)], withdrawn=withdrawn, training=training))
    if not decided.set:
        return decided, None
    shares = [decided.shares[site][0] for site in decided.set]
    copies = [sent[site].clone() for site in decided.set]
    return decided, aggregate("clip", copies, [1.0] * len(copies), shares, LAYOUT.offsets)


@pytest.mark.parametrize("withdrawn", [(), ("b",)])
def test_one_of_two_that_sends_zeros_leaves_the_other_whole(withdrawn: tuple[str, ...]) -> None:
    sent = {"a": drawn(1), "b": torch.zeros(LAYOUT.length)}
    decided, average = clipped(sent, withdrawn)
    assert decided.set == ["a"]
    assert average is not None
    assert torch.equal(average, sent["a"])


def test_half_of_the_sites_that_send_zeros_take_nothing_from_the_others() -> None:
    zero = torch.zeros(LAYOUT.length)
    sent = {"a": drawn(1), "b": drawn(1) * 2, "c": zero, "d": zero}
    decided, average = clipped(sent)
    assert decided.set == ["a", "b"]
    assert decided.shares == {"a": [[WHOLE, WHOLE]], "b": [[WHOLE // 2] * 2]}
    assert average is not None
    assert torch.allclose(average, sent["a"])


def test_in_the_flush_an_empty_residual_counts_and_cuts_nobody_down() -> None:
    sent = {"a": drawn(1), "b": torch.zeros(LAYOUT.length)}
    decided, average = clipped(sent, training=False)
    assert decided.set == ["a", "b"]
    assert average is not None
    assert torch.equal(average, sent["a"] / 2)


def test_nobody_is_cut_down_to_the_residual_of_one_that_has_withdrawn() -> None:
    sent = {"a": drawn(1), "b": drawn(2) * 0.02}
    decided, average = clipped(sent, ["b"])
    assert decided.set == ["a"]
    assert average is not None
    assert torch.equal(average, sent["a"])


def test_sites_that_have_withdrawn_do_not_move_the_median_of_the_others() -> None:
    sizes = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0, "e": 0.02, "f": 0.03, "g": 0.04, "h": 0.05}
    sent = {site: drawn(1) * size for site, size in sizes.items()}
    decided, _ = clipped(sent, ["e", "f", "g", "h"])
    assert decided.set == ["a", "b", "c", "d"]
    shares = [decided.shares[site][0][0] / WHOLE for site in decided.set]
    assert shares == pytest.approx([1.0, 1.0, 0.5, 0.25], rel=2e-3)


def test_what_one_of_two_has_nothing_of_is_cut_down_as_the_whole() -> None:
    """An expert that got no text at a site says nothing about what others may send of it."""
    lonely = drawn(1)
    LAYOUT.views(lonely)["norm"].zero_()
    sent = {"a": lonely, "b": lonely * 2}
    LAYOUT.views(sent["b"])["norm"].fill_(0.01)
    decided, average = clipped(sent)
    assert decided.shares["a"] == [[WHOLE, WHOLE]]
    assert decided.shares["b"][0] == pytest.approx([WHOLE / 2, WHOLE / 2], rel=1e-3)
    assert average is not None
    # Whoever sends nothing else is cut down to the size of what others send altogether.
    sent["b"] = torch.zeros(LAYOUT.length)
    LAYOUT.views(sent["b"])["norm"].fill_(100.0)
    _, average = clipped(sent)
    assert average is not None
    landed = LAYOUT.views(average)["norm"].norm() * 2
    assert float(landed) == pytest.approx(float(lonely.norm()), rel=1e-2)


@pytest.mark.parametrize("codec", ["topk:5", "topk:20", "top1:512", "cocktail"])
def test_what_sites_pick_lands_in_small_tensors_as_in_large_ones(codec: str) -> None:
    """Of a small tensor most sites send nothing in a round, and who sends counts all the same."""
    shapes: dict[str, tuple[int, ...]] = {"up": (256, 256), "down": (256, 256)}
    layout = Layout.of(shapes | {f"{number}.norm": (256,) for number in range(8)})
    sites = ["a", "b", "c", "d"]
    weights = dict.fromkeys(sites, 1.0)
    codec_of_all = compressor(codec, layout.geometry)
    residuals = {site: torch.zeros(layout.length) for site in sites}
    landed, plain = torch.zeros(layout.length), torch.zeros(layout.length)
    for number in range(8):
        key = ExchangeKey.outer(number, 0, 0)
        part = codec_of_all.part(0, layout.length, key.seed)
        payloads = {}
        for place, site in enumerate(sites):
            u = 0.5 * drawn(0, layout) + drawn(4 * number + place + 1, layout) + residuals[site]
            payloads[site] = part.encode(u)
            residuals[site] = u - part.decode(payloads[site])
        what = Contribution(
            key, layout.length, None, codec_of_all, "gather", weights, aggregation="clip",
            examines=True,
        )  # fmt: skip
        weighing = Weighing(what, "a", sites, part.decode)
        found = judge(Evidence(sites, [[weighing.examined(payloads)] * len(sites)]))
        average = weighing.settled(found.set, {s: each[0] for s, each in found.shares.items()})
        assert average is not None
        landed += average.abs()
        plain += sum(part.decode(payloads[site]) for site in sites).abs() / len(sites)
    for name, view in layout.views(landed).items():
        share = float(view.sum() / layout.views(plain)[name].sum().clamp(min=1e-30))
        assert share > 0.85, name
