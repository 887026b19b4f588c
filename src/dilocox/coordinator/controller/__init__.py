"""What the plan of a round is like, decided from numbers that all sites agree on.

Pure functions without torch, clock or network; the coordinator asks them and logs the answer.
"""
