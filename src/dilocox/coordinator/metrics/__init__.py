"""Metrics of a run: the sites' reports go to files, experiment trackers and the display."""
