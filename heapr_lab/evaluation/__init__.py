"""How good a model is: perplexity, divergence, and accuracy on tasks."""
