"""The loss of plans in runs of different length: four sites of a small model, simulated."""
