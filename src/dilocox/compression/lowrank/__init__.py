"""Low-rank codec in the form of PowerSGD (arXiv 1905.13727), with quantised factors."""
