"""What a plan costs in runs of different length: four sites of a small model, simulated."""
