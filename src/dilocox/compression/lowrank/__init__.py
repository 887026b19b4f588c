"""Low rank in the form of PowerSGD (1905.13727), with quantised factors."""
