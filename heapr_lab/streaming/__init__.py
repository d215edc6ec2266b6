"""Models larger than memory: weights that stay on disk, and passes by many processes.

A model whose decoder layers are read when they run has a backend of its own, `OnDisk`,
which is registered on it by what opens or slices it.
"""
