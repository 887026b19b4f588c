"""`[privacy]`: what is refused, and what a run without it keeps."""

from __future__ import annotations

from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import ConfigError

pytestmark = pytest.mark.waits


def resolved(privacy: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "model": {"path": "x"},
        "site": {"batch_size": 8, "micro_batch_size": 4},
        "sites": {"paris": {}, "lyon": {"data": "own"}},
        **sections,
    }
    if privacy is not None:
        raw["privacy"] = privacy
    return resolve_run(raw)


@pytest.mark.parametrize(
    ("privacy", "sections", "said"),
    [
        ({"noise": 1.0}, {}, "privacy.noise is a multiple of clip, and clip is 0: set clip too"),
        ({"clip": -1.0}, {}, "privacy.clip"),
        ({"clip": float("nan")}, {}, "privacy.clip"),
        ({"clip": 1.0, "delta": 0.0}, {}, "privacy.delta"),
        ({"clip": 1.0, "noise": float("inf")}, {}, "privacy.noise"),
        ({"clip": 1.0}, {"sites": {"paris": {}, "lyon": {}}}, "no site has any"),
        ({"clip": 1.0}, {"outer": {"method": "allreduce"}}, "method allreduce exchanges the grad"),
        ({"clip": 1.0}, {"outer": {"method": "cocktailsgd"}}, "choose another outer.method"),
        (
            {"clip": 1.0},
            {
                "admission": {"gate": True, "aggregation": "clip"},
                "site": {"shards": 2, "batch_size": 8, "micro_batch_size": 4},
            },
            "sites of 2 ranks judge contributions by gradients at their own parameters",
        ),
    ],
)
def test_refused(privacy: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as error:
        resolved(privacy, **sections)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_only_sites_with_own_text_are_private() -> None:
    config = resolved({"clip": 1.0, "noise": 2.0})
    assert config.own_data == config.private_sites == ("lyon",)
    assert resolved().private_sites == ()


def test_second_moments_are_not_shared() -> None:
    """They are computed from gradients that are neither clipped nor noised."""
    assert resolved().shares_moments
    assert not resolved({"clip": 1.0}).shares_moments
    assert resolved({"clip": 1.0}).sent_as("int4") == "int4"


def test_a_run_without_the_section_keeps_its_digest() -> None:
    assert resolved().digest() == resolved({}).digest() == resolved({"clip": 0.0}).digest()
    assert "privacy" not in resolved().shared(without_defaults=True)
    assert resolved({"clip": 1.0}).digest() != resolved().digest()
    assert resolved({"clip": 1.0, "noise": 1.0}).digest() != resolved({"clip": 1.0}).digest()


def test_gate_of_one_rank_is_allowed() -> None:
    """It reads anchors and contributions alone, on held-out text that all sites share."""
    resolved({"clip": 1.0}, admission={"gate": True})
