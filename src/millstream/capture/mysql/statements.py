"""DDL in the binary log: which tables a statement changes without an event for each row.

Only as much of a statement is read as says that. What cannot be read, and might concern a table, is
``unknown``, for the caller to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

EffectKind = Literal[
    "create", "drop", "truncate", "alter", "rewrite", "reload", "drop_database", "unknown"
]


@dataclass(frozen=True, slots=True)
class TableEffect:
    """What a statement does to a table.

    ``alter`` leaves every row's values as they are. ``rewrite`` keeps which rows there are, and may give each other
    values; ``reload`` may change both: the table is to be read again.
    """

    kind: EffectKind
    database: str
    table: str


_TOKEN = re.compile(
    r"\s+|--[ \t][^\n]*|#[^\n]*|/\*(?!M?!)[\s\S]*?\*/"  # blanks and comments
    r"|(?P<opened>/\*M?!\d*)|(?P<closed>\*/)"  # code for servers of a version, which ran it
    r"|(?P<quoted>`(?:[^`]|``)*`)"
    r"|(?P<text>'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\")"
    r"|(?P<word>[\w$@]+)|(?P<sign>[\s\S])"
)


def _tokens(statement: str) -> list[str]:
    """Return words in capitals, names in backquotes as `name, texts as 'text, and signs."""
    found = []
    for match in _TOKEN.finditer(statement):
        kind, token = match.lastgroup, match.group()
        if kind == "quoted":
            found.append("`" + token[1:-1].replace("``", "`"))
        elif kind == "text":
            found.append("'" + token[1:-1])
        elif kind in ("word", "sign"):
            found.append(token)
    return found


class _Words:
    """Tokens, read from front to back."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self.at = 0

    def peek(self) -> str:
        return self._tokens[self.at].upper() if self.at < len(self._tokens) else ""

    def skip(self, *words: str) -> bool:
        """Go past the words, if they come next."""
        if [token.upper() for token in self._tokens[self.at : self.at + len(words)]] != [*words]:
            return False
        self.at += len(words)
        return True

    def name(self, database: str) -> tuple[str, str]:
        """Read ``table`` or ``database.table``."""
        first = self._name()
        return (first, self._name()) if self.skip(".") else (database, first)

    def _name(self) -> str:
        token = self._tokens[self.at] if self.at < len(self._tokens) else ""
        self.at += 1
        return token[1:] if token[:1] in "`'" else token

    def rest(self) -> list[str]:
        return self._tokens[self.at :]


def table_effects(statement: str, database: str) -> list[TableEffect]:
    """Return what a statement of DDL does to tables, in its order; empty if it concerns none.

    Args:
        database: The one that names without a database are in.
    """
    words = _words_of(statement)
    readers = {
        "TRUNCATE": _truncate,
        "DROP": _drop,
        "CREATE": _create,
        "RENAME": _rename,
        "ALTER": _alter,
    }
    reader = readers.get(words.peek())
    if reader is None:
        return []
    words.at += 1
    return list(reader(words, database))


def changes_no_row_unsaid(statement: str) -> bool:
    """Say whether a statement is DDL, whose effects :func:`table_effects` tells, or administration, which has none."""
    return _words_of(statement).peek() in _WITHOUT_DML


# What MariaDB logs as statements beside DML. It marks as DDL only what has written to a table by then: not DROP FUNCTION of
# a function in a library, nor ALTER SEQUENCE, nor a GRANT on columns.
_WITHOUT_DML = frozenset(
    "ALTER ANALYZE CREATE DROP FLUSH GRANT INSTALL OPTIMIZE RENAME REPAIR REVOKE TRUNCATE UNINSTALL".split()  # noqa: SIM905 - shorter
)


def _words_of(statement: str) -> _Words:
    """Return the words of a statement, without SET STATEMENT name=value FOR before it."""
    words = _Words(_tokens(statement))
    if words.skip("SET", "STATEMENT"):
        while words.peek() not in ("FOR", ""):
            words.at += 1
        words.skip("FOR")
    return words


def _truncate(words: _Words, database: str) -> Iterator[TableEffect]:
    words.skip("TABLE")
    yield TableEffect("truncate", *words.name(database))


def _drop(words: _Words, database: str) -> Iterator[TableEffect]:
    if words.skip("TEMPORARY"):
        return
    if words.skip("DATABASE") or words.skip("SCHEMA"):
        words.skip("IF", "EXISTS")
        yield TableEffect("drop_database", words.name(database)[1], "")
    elif words.skip("TABLE") or words.skip("TABLES"):
        words.skip("IF", "EXISTS")
        yield TableEffect("drop", *words.name(database))
        while words.skip(","):
            yield TableEffect("drop", *words.name(database))


def _create(words: _Words, database: str) -> Iterator[TableEffect]:
    replaces = words.skip("OR", "REPLACE")
    if not words.skip("TABLE"):
        return
    words.skip("IF", "NOT", "EXISTS")
    name = words.name(database)
    if replaces:
        yield TableEffect("drop", *name)
    yield TableEffect("create", *name)


def _rename(words: _Words, database: str) -> Iterator[TableEffect]:
    if not (words.skip("TABLE") or words.skip("TABLES")):
        return
    words.skip("IF", "EXISTS")
    going = True
    while going:
        old = words.name(database)
        if words.skip("WAIT"):
            words.at += 1
        words.skip("NOWAIT")
        if not words.skip("TO"):
            yield TableEffect("unknown", *old)
            return
        yield TableEffect("drop", *old)
        yield TableEffect("reload", *words.name(database))
        going = words.skip(",")


def _alter(words: _Words, database: str) -> Iterator[TableEffect]:
    words.skip("ONLINE")
    ignores = words.skip("IGNORE")  # removes rows that a new key finds twice
    if not words.skip("TABLE"):
        return
    words.skip("IF", "EXISTS")
    name = words.name(database)
    if words.skip("WAIT"):
        words.at += 1
    words.skip("NOWAIT")
    clauses = list(_clauses(words.rest()))
    for clause in clauses:
        renamed = _Words(clause)
        if renamed.skip("RENAME") and renamed.peek() not in ("COLUMN", "INDEX", "KEY"):
            if not (renamed.skip("TO") or renamed.skip("AS")):
                renamed.skip("=")
            yield TableEffect("drop", *name)
            yield TableEffect("reload", *renamed.name(database))
            return
        if renamed.skip("CONVERT", "TABLE"):
            yield TableEffect("drop", *renamed.name(database))
        elif renamed.skip("CONVERT", "PARTITION") or renamed.skip("EXCHANGE", "PARTITION"):
            while renamed.peek() not in ("TABLE", ""):
                renamed.at += 1
            renamed.skip("TABLE")
            yield TableEffect("reload", *renamed.name(database))
    yield TableEffect("reload" if ignores else _worst(clauses), *name)


def _worst(clauses: list[list[str]]) -> EffectKind:
    if all(_leaves_rows(clause) for clause in clauses):
        return "alter"
    kept = all(_leaves_rows(clause) or _is_of_a_column(clause) for clause in clauses)
    return "rewrite" if kept else "reload"


def _is_of_a_column(clause: list[str]) -> bool:
    """Say whether a clause adds or removes a column that is not of the key."""
    words = [token.upper() for token in clause]
    first, second = [*words, "", ""][:2]
    named = first in ("ADD", "DROP") and second not in ("PARTITION", "PRIMARY", "SYSTEM", "PERIOD")
    return named and not {"PRIMARY", "KEY", "UNIQUE"} & set(words)


def _clauses(tokens: list[str]) -> Iterator[list[str]]:
    """Split what an ALTER does at the commas that are in no parentheses."""
    depth, clause = 0, list[str]()
    for token in tokens:
        depth += (token == "(") - (token == ")")  # noqa: S105 - signs
        if token == "," and not depth:  # noqa: S105 - as above
            yield clause
            clause = []
        else:
            clause.append(token)
    if clause:
        yield clause


_OF_KEYS = ("INDEX", "KEY", "UNIQUE", "FULLTEXT", "SPATIAL", "CONSTRAINT", "FOREIGN", "CHECK")
_OF_THE_TABLE = frozenset(
    "COMMENT AUTO_INCREMENT ENGINE ROW_FORMAT ALGORITHM LOCK FORCE STATS_PERSISTENT "  # noqa: SIM905 - shorter
    "STATS_AUTO_RECALC KEY_BLOCK_SIZE DEFAULT ENABLE DISABLE".split()
)


def _leaves_rows(clause: list[str]) -> bool:
    """Say whether a clause of ALTER TABLE surely leaves each row's values, and which rows there are."""
    first, second = ([token.upper() for token in clause] + ["", ""])[:2]
    if first in ("ADD", "DROP"):
        return second in _OF_KEYS
    if first == "RENAME":
        return second in ("INDEX", "KEY")
    if first == "ALTER":  # a column's default, an index's visibility
        return True
    return first in _OF_THE_TABLE and second != "CHARACTER"
