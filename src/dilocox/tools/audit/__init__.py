"""Repeats rounds of a recorded run, from the states that sites have kept, and judges them."""
