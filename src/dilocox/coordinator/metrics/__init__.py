"""Metrics of a run: from the sites' reports to files, trackers and the display."""
