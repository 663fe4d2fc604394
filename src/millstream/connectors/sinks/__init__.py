"""Sink connectors: the records of a topic, written to something outside."""
