"""What stands beside a run: planner, audits, reports, releases, test networks."""
