"""An exchange on a device of its own: the same bits as on a CPU, and only payloads between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dilocox.outer.contribution import Outcome
from tests.support.exchanging import MATRICES, run
from tests.support.failing_sites import LINK, config_of, run_sites
from tests.support.streams import play_device

pytestmark = pytest.mark.waits

SITES = ("paris", "lyon")


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


BITS = ("average", "contributors", "sent", "second_error", "payload_bytes", "advance",
        "effective_rank", "payloads")  # fmt: skip


def alike(one: Outcome, other: Outcome) -> bool:
    return all(same(getattr(one, name), getattr(other, name)) for name in BITS)


@pytest.mark.parametrize(
    ("mode", "codec", "observers"),
    [
        ("gather", "topk:64", ()),
        ("gather", "cocktail", ()),
        ("gather", "lowrank:4", ("oslo",)),
        ("reduce", "top1:64", ("oslo",)),
        ("reduce", "int4", ()),
    ],
)
def test_an_exchange_has_the_same_outcome(
    mode: str, codec: str, observers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(mode, codec, observers=observers, geometry=MATRICES)
    play_device(monkeypatch)
    found = run(mode, codec, observers=observers, geometry=MATRICES, on_device=True)
    assert found.keys() == expected.keys()
    for site, outcome in found.items():
        assert alike(outcome, expected[site]), site


@pytest.mark.parametrize(("mode", "codec"), [("gather", "topk:64"), ("reduce", "int4")])
def test_a_run_has_the_same_anchors(
    mode: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_sites(config_of(tmp_path / "plain", SITES, mode, 3, codec), (), 3 * LINK)
    play_device(monkeypatch)
    played = run_sites(config_of(tmp_path / "played", SITES, mode, 3, codec), (), 3 * LINK)
    assert (played.phase, played.reason) == ("finished", ""), played.messages
    for site in SITES:
        expected, found = plain.sites[site], played.sites[site]
        assert list(found.digests) == [0, 1, 2, -1]
        assert found.digests == expected.digests
        assert found.averages == expected.averages
        for fragment, residual in expected.residual.items():
            assert (found.residual[fragment] == residual).all()
