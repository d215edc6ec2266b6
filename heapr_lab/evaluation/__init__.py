"""How good a model is: perplexity, and divergence from another model."""
