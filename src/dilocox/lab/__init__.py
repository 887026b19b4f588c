"""Shaped networks on one machine: what benchmarks and tests measure sites on."""

from dilocox.lab.netns import Counters, LabError, Measured, Network, why_not

__all__ = ["Counters", "LabError", "Measured", "Network", "why_not"]
