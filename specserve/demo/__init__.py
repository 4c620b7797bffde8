"""The model pair of the first minute: made from what every Python installation carries."""
