"""Slow, obviously right twins: token by token, autograd only, for tests alone."""
