"""What two dishonest sites of eight do to training, by attack and by rule of admission."""
