"""From a table to a mask, and from a mask to a smaller model."""
