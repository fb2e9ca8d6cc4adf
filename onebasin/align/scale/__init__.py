"""Positive scales: the lightest network of an orbit, and how scales are distributed on it."""
