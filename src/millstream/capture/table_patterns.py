"""Which tables are captured: names with ``*`` and ``?``, such as ``shop.*`` or ``orders``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate

from millstream.errors import ConfigError


class TablePatterns:
    """Says of each table whether it is captured.

    Args:
        patterns: ``database.table`` each, or ``table`` in the database of the address.
        excluded: Databases that are never captured: the server's own.

    Raises:
        ConfigError: there is no pattern, or one has no name.
    """

    def __init__(
        self, patterns: Sequence[str], database: str, excluded: frozenset[str] = frozenset()
    ) -> None:
        if not patterns:
            raise ConfigError("no table is named. Give some, such as --tables 'shop.*'.")
        self._text = ", ".join(patterns)
        self._excluded = excluded
        self._patterns = []
        for pattern in patterns:
            parts = pattern.split(".")
            if len(parts) > 2 or not all(parts):
                raise ConfigError(
                    f"{pattern!r} names no table. Give database.table or table, with * for any letters."
                )
            both = (database, parts[0]) if len(parts) == 1 else (parts[0], parts[1])
            self._patterns.append(tuple(re.compile(translate(part)) for part in both))

    def __str__(self) -> str:
        return self._text

    def __call__(self, database: str, table: str) -> bool:
        """Say whether this table is captured."""
        return database not in self._excluded and any(
            of_database.match(database) and of_table.match(table)
            for of_database, of_table in self._patterns
        )
