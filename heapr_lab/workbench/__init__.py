"""The cached stages of one model: measure, select, evaluate."""
