"""`python -m benchmarks.wan`: see `command`."""

import sys

from benchmarks.wan.command import main

if __name__ == "__main__":
    sys.exit(main())
