"""The `dilocox` command. A module of a subcommand parses, calls one function and prints."""
