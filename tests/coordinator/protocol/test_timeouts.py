"""Limits that contain each other, whatever the run file says."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.network import NetworkSection
from dilocox.coordinator.protocol.messages import MAX_POLL
from dilocox.coordinator.protocol.timeouts import LOOKS, Timeouts

pytestmark = pytest.mark.waits


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(5.0, 1e4), st.floats(0.01, 1.0))
def test_order_of_limits(link: float, share: float) -> None:
    limits = Timeouts.derive(NetworkSection(link_timeout=link, heartbeat=link * share))
    inner = [
        limits.beat,
        limits.silence,
        limits.heartbeat,
        limits.reconnect,
        limits.first_beat,
        limits.link,
    ]
    outer = [limits.link, limits.form, limits.stall]
    for chain in (inner, outer):
        assert chain == sorted(chain)
    assert limits.beat * 4 < limits.heartbeat
    # A rank falls silent at its last beat, and the coordinator looks every half beat.
    assert limits.silence + LOOKS * limits.beat == pytest.approx(limits.heartbeat)
    assert limits.retry < limits.retry_most < limits.coordinator < limits.rejoin
    assert limits.poll <= MAX_POLL
    assert limits.poll + limits.request < limits.coordinator
    assert limits.heartbeat < limits.coordinator
    assert limits.parting < limits.dial <= limits.greeting <= limits.link
    lines = limits.table().splitlines()
    assert len(lines) == len(fields(Timeouts))
    assert len({len(line) for line in lines}) == 1
