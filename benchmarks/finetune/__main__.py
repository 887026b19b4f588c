"""`python -m benchmarks.finetune`: see `command`."""

import sys

from benchmarks.finetune.command import main

if __name__ == "__main__":
    sys.exit(main())
