"""Run as `python -m benchmarks.time_to_loss`."""

import sys

from benchmarks.time_to_loss.command import main

if __name__ == "__main__":
    sys.exit(main())
