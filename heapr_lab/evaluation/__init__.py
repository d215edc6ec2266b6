"""How good a model is: perplexity, accuracy, latency, and what happens in a passage."""
