"""Beyond one shot: compensation, elimination, compress, healing."""
