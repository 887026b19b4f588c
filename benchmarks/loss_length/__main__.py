"""`python -m benchmarks.loss_length`: see `command`."""

import sys

from benchmarks.loss_length.command import main

if __name__ == "__main__":
    sys.exit(main())
