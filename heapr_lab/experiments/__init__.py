"""What is published: the paper's experiments, our benchmarks, the reproduction."""
