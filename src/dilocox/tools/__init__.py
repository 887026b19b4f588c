"""Tools beside a training run: planner, audits, reports, releases, test networks."""
