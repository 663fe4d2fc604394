"""Metrics for Prometheus: their definitions, their text, and the server of a process that has no other."""
