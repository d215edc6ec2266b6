"""Beyond one shot: compensation, elimination, rounds, learned masks, recovery."""
