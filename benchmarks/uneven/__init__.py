"""Sites of unequal speed: how much of their summed speed a run with all of them has."""
