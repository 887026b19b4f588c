"""Parts of the acceptance run that measure nothing: for the tests of its runner."""

from __future__ import annotations

import time

from benchmarks.gpu.child import Context, Outcome


def quick(context: Context) -> None:
    """Three rows: one that passes, one with figures, one that raises."""
    context.check("passes", lambda: Outcome(True, "as it should be"))
    context.check("figures", lambda: Outcome(None, "", {"speed": 2.0}))
    context.check("raises", _raises)


def hang(context: Context) -> None:
    """One row, and another that never comes."""
    context.check("before", lambda: Outcome(True))
    print("waiting", flush=True)
    time.sleep(600.0)


def crash(context: Context) -> None:
    """No row."""
    raise SystemExit("it has crashed")


def _raises() -> Outcome:
    raise ValueError("a wrong\nvalue")
