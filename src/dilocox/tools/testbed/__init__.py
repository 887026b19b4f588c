"""Shaped networks on one machine: what benchmarks and tests measure sites on."""

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
