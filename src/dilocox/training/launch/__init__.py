"""Starts and supervises the processes of a run: coordinator, sites and ranks."""
