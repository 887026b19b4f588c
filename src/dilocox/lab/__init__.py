"""Shaped networks on one machine: what benchmarks and tests measure sites on."""

from dilocox.lab.lab import HUB, Checked, Lab
from dilocox.lab.measuring import Measured, verify_links
from dilocox.lab.netns import Counters, LabError, Network, why_not

__all__ = [
    "HUB",
    "Checked",
    "Counters",
    "Lab",
    "LabError",
    "Measured",
    "Network",
    "verify_links",
    "why_not",
]
