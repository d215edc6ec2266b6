"""The command line: the stages without a notebook."""
