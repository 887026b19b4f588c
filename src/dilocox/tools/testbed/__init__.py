"""Shaped networks of sites on one machine (*labs*), for benchmarks and tests."""

from dilocox.tools.testbed.link_measurement import Measured, verify_links
from dilocox.tools.testbed.netns import Counters, LabError, Network, unsupported_reason
from dilocox.tools.testbed.testbed import HUB, Checked, Lab

__all__ = [
    "HUB",
    "Checked",
    "Counters",
    "Lab",
    "LabError",
    "Measured",
    "Network",
    "unsupported_reason",
    "verify_links",
]
