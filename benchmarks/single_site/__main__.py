"""`python -m benchmarks.single_site`: see `command`."""

import sys

from benchmarks.single_site.command import main

if __name__ == "__main__":
    sys.exit(main())
