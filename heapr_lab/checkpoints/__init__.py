"""Pruned models on disk, in forms that transformers and engines load."""
