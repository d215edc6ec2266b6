"""Figures and tables of the benchmarks, from their committed results."""
