"""Stored searches: queries that are kept, and rows that are matched with them: see :mod:`.operator`."""
