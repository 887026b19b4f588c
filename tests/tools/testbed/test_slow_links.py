"""Links so slow that their queues hold seconds. A module of its own: a process has one lab."""

from __future__ import annotations

import pytest
from tests.support.lab_needs import needs_lab

from dilocox.tools.testbed import Lab

pytestmark = pytest.mark.alone

QUOTA = 0.12
"""Cores per site."""
SECONDS = 0.5


@needs_lab
@pytest.mark.slow
def test_links_on_which_a_full_queue_takes_seconds_are_measured() -> None:
    """What a measurement leaves in it is over before the next one, and before round trips."""
    with Lab(["a", "b"], "70kbit", quota=QUOTA) as lab:
        assert len(lab.verify(SECONDS).links) == 4
    with Lab(["a", "b"], "600kbit", ["a-b=300kbit"], quota=QUOTA) as lab:
        assert len(lab.verify(SECONDS).links) == 6
