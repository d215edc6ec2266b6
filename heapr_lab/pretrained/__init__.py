"""Published weights in the workbench: fetched, checked, converted, and carved."""
