"""`python -m dilocox`."""

from dilocox.cli.main import main

if __name__ == "__main__":
    main()
