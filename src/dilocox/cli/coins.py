"""Reads a number of coins from the command line."""

from __future__ import annotations

import argparse
from decimal import Decimal, InvalidOperation


def coin(text: str) -> int:
    """Parse a number of coins; return wei."""
    try:
        wei = Decimal(text) * 10**18
        if wei.is_finite() and wei >= 0 and wei == int(wei):
            return int(wei)
    except InvalidOperation:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of coins, such as 1.5")
