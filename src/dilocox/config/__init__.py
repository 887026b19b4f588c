"""The run file: every section and key, with types, defaults and checks."""
