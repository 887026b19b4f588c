"""Gradients that are reduced once per step are of another determinism class, and only these."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from dilocox.config.adapter import AdapterSection
from dilocox.training.determinism_class import facts_here
from tests.support.planned_runs import run

pytestmark = pytest.mark.waits


def test_only_another_way_than_before_is_said() -> None:
    device = torch.device("cpu")
    before, once = facts_here(run(), device), facts_here(run(), device, whole_gradients=True)
    assert "gradient_sync" not in before["layout"]
    assert once["layout"].pop("gradient_sync") == "step"
    assert once == before


def test_peft_is_said_of_adapters_alone() -> None:
    plain = run()
    adapted = plain.model_copy(update={"adapter": AdapterSection()})
    device = torch.device("cpu")
    before, after = facts_here(plain, device), facts_here(adapted, device)
    assert after["packages"].pop("peft") == importlib.metadata.version("peft")
    assert after == before
