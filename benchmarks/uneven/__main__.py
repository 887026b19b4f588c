"""`python -m benchmarks.uneven`: see `command`."""

import sys

from benchmarks.uneven.command import main

if __name__ == "__main__":
    sys.exit(main())
