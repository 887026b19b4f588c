"""`python -m benchmarks.scaling`: see `command`."""

import sys

from benchmarks.scaling.command import main

if __name__ == "__main__":
    sys.exit(main())
