"""The panel that notebooks are kept open for: choose, evaluate, inspect, compare."""

from heapr_lab.explorer.panel import Explorer, explore

__all__ = ["Explorer", "explore"]
