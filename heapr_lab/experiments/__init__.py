"""What is published: the paper's experiments, its claims, the reproduction."""
