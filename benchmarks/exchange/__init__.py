"""How much of a shaped link the exchange uses, between two, four and eight sites."""
