"""Looking a log folder over, and giving up what cannot be read."""
