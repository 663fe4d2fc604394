"""Capture from SQLite: triggers write each change into a table of the database itself, which capture reads.

So databases are captured that other programs write, in any language, without a line changed in them. What this
does to the database is in docs/capture-sqlite.md.
"""
