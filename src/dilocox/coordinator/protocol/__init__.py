"""Messages between ranks and the coordinator, and the rules that both sides compute identically."""
