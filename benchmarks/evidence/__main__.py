"""Run as `python -m benchmarks.evidence`."""

import sys

from benchmarks.evidence.command import main

if __name__ == "__main__":
    sys.exit(main())
