"""The small models of our own: training them, and the cards that describe them."""
