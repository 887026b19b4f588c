"""The `dilocox` command: one module per subcommand parses, calls one function and prints."""
