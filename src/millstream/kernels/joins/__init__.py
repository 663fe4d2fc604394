"""Joins of two inputs by equal keys."""
