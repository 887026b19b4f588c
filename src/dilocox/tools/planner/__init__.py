"""The planner predicts a run's memory, time, traffic and cost before any GPU is rented.

`predict` computes the speed alone; `plan_run` computes the whole plan. Both need only the model's
configuration: no weights, no GPU, no network.
"""
