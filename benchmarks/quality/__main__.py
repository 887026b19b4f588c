"""`python -m benchmarks.quality`: see `command`."""

import sys

from benchmarks.quality.command import main

if __name__ == "__main__":
    sys.exit(main())
