"""The version of dilocox."""

__version__ = "0.1.0"
