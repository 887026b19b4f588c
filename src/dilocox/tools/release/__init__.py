"""A run's model to be handed out: its folder, a card filled from the record, and a signature."""
