"""Beyond one shot: compensation, elimination, compress, distillation."""
