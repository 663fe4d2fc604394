"""Statements of SQL as tokens: enough to find names, parameters and the ends of statements, and no grammar.

What a token means is the engine's to say. Here a text is cut so that nothing within a string, a quoted name or a comment is
taken for something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from millstream.errors import SqlError

TokenKind = Literal["space", "string", "name", "quoted", "parameter", "number", "other"]

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|--[^\n]*)
    |(?P<string>[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|\$\$.*?\$\$|\$(?P<tag>[^\W\d]\w*)\$.*?\$(?P=tag)\$)
    |(?P<quoted>"(?:[^"]|"")*")
    |(?P<unended>[eE]'|\$\$|\$[^\W\d]\w*\$)
    |(?P<parameter>\$\d+)
    |(?P<number>\d[\w.]*(?:(?<=[eE])[+-]\d+)?)
    |(?P<name>[^\W\d][\w$]*)
    |(?P<other>::|[^\s'"])
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT = re.compile(r"/\*|\*/")


class SqlToken(NamedTuple):
    """A piece of a statement. Spaces and comments are of the kind ``space``."""

    kind: TokenKind
    text: str

    @property
    def name(self) -> str:
        """What it names, in lower case unless it is quoted; "" of what is no name."""
        if self.kind == "name":
            return self.text.lower()
        return self.text[1:-1].replace('""', '"') if self.kind == "quoted" else ""


def tokenize(text: str) -> list[SqlToken]:
    """Cut a text into tokens.

    Raises:
        SqlError: a string, a quoted name or a comment does not end.
    """
    tokens: list[SqlToken] = []
    at = 0
    while at < len(text):
        if text.startswith("/*", at):
            at = _end_of_comment(text, at)
            tokens.append(SqlToken("space", " "))
            continue
        found = _TOKEN.match(text, at)
        if found is None or found.lastgroup == "unended":
            raise SqlError(
                f"What begins with {text[at : at + 20]!r} does not end. Close the quotes.",
                sqlstate="42601",
            )
        kind = found.lastgroup
        if kind == "tag":
            kind = "string"
        tokens.append(SqlToken(kind, found.group()))  # type: ignore[arg-type] # one of the groups
        at = found.end()
    return tokens


def _end_of_comment(text: str, start: int) -> int:
    depth = 0
    for found in _COMMENT.finditer(text, start):  # they nest
        depth += 1 if found.group() == "/*" else -1
        if not depth:
            return found.end()
    raise SqlError("A comment does not end. Close it with */.", sqlstate="42601")


def to_text(tokens: Iterable[SqlToken]) -> str:
    """Return the text of tokens."""
    return "".join(token.text for token in tokens).strip()


def without_spaces(tokens: Iterable[SqlToken]) -> list[SqlToken]:
    """Return the tokens that are no spaces or comments."""
    return [token for token in tokens if token.kind != "space"]


def split_statements(text: str) -> list[list[SqlToken]]:
    """Return the statements of a text that are separated by semicolons, without those that are empty."""
    statements: list[list[SqlToken]] = [[]]
    for token in tokenize(text):
        if token == ("other", ";"):
            statements.append([])
        else:
            statements[-1].append(token)
    return [one for one in statements if without_spaces(one)]


def first_words(tokens: Sequence[SqlToken], count: int) -> list[str]:
    """Return the first words of a statement in upper case."""
    return [token.text.upper() for token in without_spaces(tokens)[:count]]


class NamesInText:
    """Says whether a statement may mean a table: whether its name is in the text, whatever it stands for there.

    It may say so of a table that is not meant, which is then read for nothing. ``strings``: also within strings, which may name
    tables as well.
    """

    def __init__(self, tokens: Iterable[SqlToken], *, strings: bool = True) -> None:
        kept = without_spaces(tokens)
        # Of names that differ only in case all but one have a number behind #.
        self._names = {token.name.lower().partition("#")[0] for token in kept if token.name}
        texts = [token.text.lower() for token in kept if token.kind == "string"]
        self._strings = texts if strings else []

    def __contains__(self, name: object) -> bool:
        folded = str(name).lower().partition("#")[0]
        return folded in self._names or any(folded in text for text in self._strings)
