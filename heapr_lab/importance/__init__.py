"""Statistics of every atomic expert, and the scores that are made of them."""
