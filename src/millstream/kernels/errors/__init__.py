"""Failing rows of the user's code, and dead letters: what is kept of what cannot be processed."""
