"""Operators that maintain tables: what a batch changes in their input changes their output."""
