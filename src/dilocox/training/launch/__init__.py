"""Starts and watches the processes of a run: coordinator, sites, ranks."""
