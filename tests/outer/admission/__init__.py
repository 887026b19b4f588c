"""Tests of `dilocox.outer.admission`."""
