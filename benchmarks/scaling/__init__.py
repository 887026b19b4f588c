"""How far a run scales on paper: 2 to 64 sites, simulated with the planner's cost model."""
