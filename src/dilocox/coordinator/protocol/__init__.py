"""What ranks and coordinator say to each other, and the rules that both ends compute alike."""
