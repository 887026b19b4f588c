"""The run file: its sections and keys, with their types, defaults and checks."""
