"""Limits of settlement that are known without the packages of a chain."""

FEE = 10**17
"""Wei that the fee of one transaction may reach, unless the user says otherwise."""
