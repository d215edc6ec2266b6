"""Beyond one shot: compensation, elimination, compress, biases, distillation."""
