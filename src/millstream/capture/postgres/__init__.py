"""Capture from PostgreSQL: logical decoding by pgoutput, and snapshots tied to places in the WAL.

``messages`` turns the bytes of the stream into messages, without a connection, and ``values`` their texts into JSON.
``source`` reads a server. What is asked of the server, and what is refused, is in docs/capture.md.
"""
