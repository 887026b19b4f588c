"""`python -m benchmarks.attacks`: see `command`."""

from benchmarks.attacks.command import main

if __name__ == "__main__":
    main()
