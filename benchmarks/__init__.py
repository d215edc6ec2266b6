"""What is run by hand: measurements, and the training of the small models."""
