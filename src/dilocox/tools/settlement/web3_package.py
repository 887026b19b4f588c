"""Imports the package web3 without its change of Python's limit of recursion."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from dilocox.errors import SettlementError

MISSING = "the package web3 is not installed: pip install 'dilocox[chain]'"


def load_web3() -> None:
    """Import web3, so that later imports find it, and keep the limit of recursion.

    A package that web3 imports (py_ecc) raises the limit from 1,000 to 100,000. Deeply nested JSON
    of a stranger's record would then end the process with a segmentation fault. With Python's own
    limit such JSON raises `RecursionError`, which readers of records expect.

    Raises `SettlementError` if web3 is not installed.
    """
    if importlib.util.find_spec("web3") is None:
        raise SettlementError(MISSING)
    limit = sys.getrecursionlimit()
    try:
        importlib.import_module("web3")
    finally:
        sys.setrecursionlimit(limit)
