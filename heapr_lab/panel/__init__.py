"""The interactive panel: widgets in notebooks, and the same as a page of its own."""
