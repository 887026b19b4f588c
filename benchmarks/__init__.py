"""Benchmarks of dilocox; `python -m benchmarks.NAME --help` explains what a benchmark measures.

This file makes Python find this package before installed packages of the same name.
"""
