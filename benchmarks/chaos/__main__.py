"""`python -m benchmarks.chaos`: see `command`."""

import sys

from benchmarks.chaos.command import main

if __name__ == "__main__":
    sys.exit(main())
