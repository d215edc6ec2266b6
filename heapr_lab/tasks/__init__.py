"""Accuracy on tasks: stock ones of a harness, continuations of any corpus, items."""
