"""Patterns over the rows of a key, in the order of event time."""
