"""Audits rounds of a recorded run: replays them from states that sites kept, and judges them."""
