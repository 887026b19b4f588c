"""`python -m benchmarks.exchange`: see `command`."""

import sys

from benchmarks.exchange.command import main

if __name__ == "__main__":
    sys.exit(main())
