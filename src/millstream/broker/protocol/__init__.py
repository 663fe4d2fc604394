"""Kafka's protocol: how bytes, structs, messages and error codes look on the wire."""
