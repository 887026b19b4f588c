"""The planner: memory, time, bytes and money of a run before any GPU is rented.

`predict` says how fast a run would go; `plan_run` says all of it. Everything is computed from the
model's configuration: no weights, no GPU, no network.
"""
