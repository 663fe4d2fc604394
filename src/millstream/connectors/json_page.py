"""Rows of a JSON document, each with the text that it has there: numbers keep their digits.

A path such as ``data.items`` leads to an array of rows, or to an object, which is one row; an empty path is the document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from millstream.errors import ConfigError, RetriableError

_SPACE = " \t\n\r"


@dataclass(frozen=True)
class PageRow:
    """A row: its text, and what it is. ``flaw`` says why it is no JSON, though it could be read."""

    text: str
    event: Any
    flaw: str = ""


class JsonPage:
    """A document that was received from ``shown``.

    Raises:
        RetriableError: it is no JSON, as what a proxy sends while the server behind it is away.
    """

    def __init__(self, body: bytes, shown: str) -> None:
        self._shown = shown
        self._flaw = ""
        decoder = json.JSONDecoder(parse_constant=self._note)
        self._decode = decoder.raw_decode
        try:
            self._text = body.decode("utf-8-sig")
            self.document = decoder.decode(self._text)
        except (ValueError, RecursionError):
            raise RetriableError(
                f"{shown} responded with what is no JSON. It is tried again."
            ) from None

    def rows(self, path: str) -> Iterator[PageRow]:
        """Yield the rows at a path.

        Raises:
            ConfigError: there are none.
        """
        names = path.split(".") if path else []
        if not isinstance(self.at(path), list | dict):
            raise ConfigError(
                f"{self._shown} responded with JSON that has no rows at {path!r}, but {self._seen()}. Give rows=, the names that "
                "lead to a list, such as rows='data.items'."
            )
        place = self._skip(0)
        for name in names:
            place = self._member(place, name)
        if self._text[place] == "{":
            yield self._row(place)[0]
            return
        place = self._skip(place + 1)
        while self._text[place] != "]":
            row, place = self._row(place)
            yield row
            place = self._skip(place)
            if self._text[place] == ",":
                place = self._skip(place + 1)

    def at(self, path: str) -> Any:
        """Return what is at a path; None where nothing is."""
        found = self.document
        for name in path.split(".") if path else []:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _seen(self) -> str:
        if isinstance(self.document, dict):
            return f"the names {', '.join(map(repr, self.document))}"[:200]
        return f"a {type(self.document).__name__}"

    def _row(self, place: int) -> tuple[PageRow, int]:
        self._flaw = ""
        event, end = self._decode(self._text, place)
        return PageRow(self._text[place:end], event, self._flaw), end

    def _member(self, place: int, wanted: str) -> int:
        """Return where the value of a member begins; of the last one, if the name is there twice."""
        found = -1
        place = self._skip(place + 1)
        while self._text[place] != "}":
            name, place = self._decode(self._text, place)
            place = self._skip(self._skip(place) + 1)
            if name == wanted:
                found = place
            place = self._skip(self._decode(self._text, place)[1])
            if self._text[place] == ",":
                place = self._skip(place + 1)
        return found

    def _skip(self, place: int) -> int:
        while self._text[place] in _SPACE:
            place += 1
        return place

    def _note(self, word: str) -> None:
        self._flaw = f"{word} is no JSON"
