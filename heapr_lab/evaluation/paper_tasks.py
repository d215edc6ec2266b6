"""The seven zero-shot tasks of the paper."""

PAPER_TASKS = {
    "openbookqa": ("test", 500),
    "arc_easy": ("test", 2376),
    "winogrande": ("validation", 1267),
    "hellaswag": ("validation", 10042),
    "arc_challenge": ("test", 1172),
    "piqa": ("validation", 1838),
    "mathqa": ("test", 2985),
}
"""Names in the order of the paper's main table, with the split that the harness
evaluates and its number of items."""
