"""The text that models read: corpora, tokens, calibration and test windows."""
