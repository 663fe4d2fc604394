"""Compaction: the last record of each key is retained, at its offset."""
