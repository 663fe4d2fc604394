"""Statements on PostgreSQL's catalogs, written so that the engine reads those of `catalog.py`, and knows the words.

==================================  ==============================================================================
what clients write                  what the engine is given
==================================  ==============================================================================
``pg_catalog.pg_class``             ``pgc.pg_class``; of names that are not ours the name alone
``information_schema.tables``       ``pgi.tables``
``OPERATOR(pg_catalog.~)``          ``~``
``COLLATE pg_catalog.default``      nothing
``'clicks'::regclass``              ``pgc.to_regclass('clicks')``
``= ANY('{a,b}')``                  ``= ANY(['a', 'b'])``, as drivers give a list
``'{a,b}'::text[]``                 ``'[a,b]'::text[]``; of a statement on catalogs also ``'{0}'`` alone
==================================  ==============================================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from millstream.sql_queries.server.catalog import CATALOG_NAMES, INFORMATION_NAMES
from millstream.sql_queries.server.parameters import array_elements
from millstream.sql_queries.sql_table import quote_text
from millstream.sql_queries.tokens import SqlToken, without_spaces

_LOOKED_UP = {"regclass": "to_regclass", "regtype": "to_regtype"}
_PLAIN_COLLATIONS = ("c", "posix", "default")
_ARRAY = re.compile(r"'\{(\d*(?:,\d+)*)\}'")
_SPACE = SqlToken("space", " ")


def names_catalog(tokens: Sequence[SqlToken]) -> bool:
    """Return whether a statement is about the catalogs."""
    names = {token.name.lower() for token in tokens if token.name}
    return bool(names & {"pg_catalog", "information_schema"} or names & CATALOG_NAMES)


def rewrite(tokens: Sequence[SqlToken]) -> list[SqlToken]:
    """Return a statement as the engine is given it."""
    return _Rewriter(tokens, of_catalog=names_catalog(tokens)).run()


class _Rewriter:
    def __init__(self, tokens: Sequence[SqlToken], *, of_catalog: bool) -> None:
        self._tokens = tokens
        self._of_catalog = of_catalog
        self._at = 0
        self._out: list[SqlToken] = []

    def run(self) -> list[SqlToken]:
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            name = token.name.lower()
            if name in ("pg_catalog", "information_schema") and self._text(1) == ".":
                self._qualified(name)
            elif token.text.upper() == "OPERATOR" and self._text(1) == "(":
                self._operator()
            elif token.text.upper() == "COLLATE" and self._collation()[0] in _PLAIN_COLLATIONS:
                self._at = self._collation()[1]
                self._out.append(_SPACE)
            elif token.kind == "string" and self._text(1) == "::":
                self._cast_string(token)
            elif token.kind == "string" and self._is_any():
                self._out.append(SqlToken("other", _list_of(token.text)))
                self._at += 1
            elif token.kind == "string" and self._of_catalog:
                self._out.append(SqlToken("string", _ARRAY.sub(r"'[\1]'", token.text)))
                self._at += 1
            else:
                self._out.append(token)
                self._at += 1
        return self._out

    def _index(self, count: int) -> int:
        """Return where the token is that comes so many after this one, spaces left out; the end if there is none."""
        at = self._at
        while count and at < len(self._tokens):
            at += 1
            if at < len(self._tokens) and self._tokens[at].kind != "space":
                count -= 1
        return at

    def _token(self, count: int) -> SqlToken:
        at = self._index(count)
        return self._tokens[at] if at < len(self._tokens) else _SPACE

    def _text(self, count: int) -> str:
        return self._token(count).text.lower()

    def _qualified(self, schema: str) -> None:
        name = self._token(2).name.lower()
        if schema == "information_schema" and name in INFORMATION_NAMES:
            self._out.append(SqlToken("name", "pgi."))
        elif name in CATALOG_NAMES:
            self._out.append(SqlToken("name", "pgc."))
        self._at = self._index(2)

    def _operator(self) -> None:
        self._at = self._index(2)
        inner: list[SqlToken] = []
        while self._at < len(self._tokens) and self._tokens[self._at].text != ")":
            inner.append(self._tokens[self._at])
            self._at += 1
        self._at += 1
        signs = [token for token in inner if not token.name and token.text not in (".", " ")]
        self._out += [_SPACE, *signs, _SPACE]

    def _is_any(self) -> bool:
        """Say whether what is next stands alone within ANY( ) or ALL( )."""
        before = without_spaces(self._out)[-2:]
        opened = (
            len(before) == 2 and before[1].text == "(" and before[0].text.upper() in ("ANY", "ALL")
        )
        return opened and self._text(1) == ")"

    def _collation(self) -> tuple[str, int]:
        """Return which collation is named next, and where the token after it is."""
        steps = 3 if self._text(2) == "." else 1
        return self._token(steps).name.lower(), self._index(steps + 1)

    def _cast_string(self, token: SqlToken) -> None:
        qualified = self._text(2) == "pg_catalog" and self._text(3) == "."
        place = 4 if qualified else 2
        kind = self._text(place)
        plain = token.text.replace("pg_catalog.", "") if kind.startswith("reg") else token.text
        if kind in _LOOKED_UP:
            self._out.append(SqlToken("other", f"pgc.{_LOOKED_UP[kind]}({plain})"))
            self._at = self._index(place + 1)
            return
        if self._text(place + 1) == "[" and plain.startswith("'{") and plain.endswith("}'"):
            plain = f"'[{plain[2:-2]}]'"
        self._out.append(SqlToken("string", plain))
        self._at += 1


def _list_of(string: str) -> str:
    """Return an array of PostgreSQL's, in a string, as a list; the string as it is, if it holds none."""
    try:
        items = array_elements(string[1:-1].replace("''", "'"))
    except ValueError:
        return string
    return f"[{', '.join('NULL' if one is None else quote_text(one) for one in items)}]"
