"""What dilocox costs where there is no network: one site against a plain loop."""
