"""Code with which the coordinator and the ranks write the record during a run."""
