"""Inspecting a log folder, and giving up what cannot be read."""
