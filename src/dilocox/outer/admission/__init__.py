"""Admission: what a site finds in the others' contributions, and what is made of those that count.

What it finds goes into its vote (`examine`); the coordinator settles it
(`dilocox.outer.coordinator.judging`); the averages are the same bits everywhere (`aggregation`).
"""
