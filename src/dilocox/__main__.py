"""`python -m dilocox`."""

from dilocox.cli import main

if __name__ == "__main__":
    main()
