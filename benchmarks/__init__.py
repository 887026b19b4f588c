"""Measurements of dilocox; `python -m benchmarks.NAME --help` says what one measures.

A package with this file is found before packages of the same name that others install.
"""
