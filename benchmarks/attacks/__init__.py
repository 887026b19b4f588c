"""The harm that two dishonest sites of eight do to training, by attack and by admission rule."""
