"""Capture from MariaDB and MySQL: the binary log, decoded here, and chunked snapshots.

``decoder`` turns the bytes of the log into events, without a connection: ``table_map`` and ``values`` say how
a row is laid out, ``row_images`` reads it. ``source`` reads a server. What is asked of the server, and what
is refused, is in docs/capture-mysql.md.
"""
