"""MailText: texts of an e-mail with the fields of a row in them, ``Order {id} is {state}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millstream.connectors.sinks.json_text import json_text
from millstream.errors import ConfigError

_FIELD = re.compile(r"\{([^{}]*)\}")


class MailText:
    """A text with fields in braces."""

    def __init__(self, what: str, text: str) -> None:
        self.what = what
        self.text = text
        rest = _FIELD.sub("", text)
        if "{" in rest or "}" in rest or "" in self.fields:
            raise ConfigError(
                f"{what} is {text!r}. Give a text whose fields are in braces, such as 'Order {{id}}'."
            )

    @property
    def fields(self) -> list[str]:
        """The names of the fields."""
        return _FIELD.findall(self.text)

    def filled(self, row: Mapping[str, Any]) -> str:
        """Return the text with the fields of a row: text as it is, other values as JSON.

        Raises:
            ValueError: the row lacks one, or it is null.
        """
        return _FIELD.sub(lambda found: self._value(row, found[1]), self.text)

    def _value(self, row: Mapping[str, Any], name: str) -> str:
        value = row.get(name)
        if value is None:
            raise ValueError(f"{self.what} needs the field {name!r}, which it lacks")
        return value if isinstance(value, str) else json_text(value)


def one_line(what: str, text: str) -> str:
    """Return a text that can be a header.

    Raises:
        ValueError: it has line ends or other signs that are not printed: a header could be broken with them.
    """
    if not text.isprintable():
        raise ValueError(f"{what} has a line end, or another character that is not printed")
    return text
