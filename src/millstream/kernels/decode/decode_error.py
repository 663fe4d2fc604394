"""The error of a value that does not fit its schema: one sentence with the field and its value."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

REASON_CHARACTERS_MAX = 100
_SHOWN_CHARACTERS_MAX = 40


class DecodeError(Exception):
    """Why a value does not fit. ``path`` leads to the place, outermost first."""

    def __init__(self, what: str, value: Any = None, *, shown: bool = True) -> None:
        super().__init__(what)
        self.what = what
        self.value = value
        self.shown = shown
        self.path = ""

    def within(self, step: str) -> DecodeError:
        """Put ``step`` in front of the path."""
        self.path = step + (f".{self.path}" if self.path and self.path[0] != "[" else self.path)
        return self

    def reason(self) -> str:
        """Return the sentence: ``field 'age' is -3: must be >= 0``."""
        if not self.path:
            return cut(self.what, REASON_CHARACTERS_MAX)
        if not self.shown:
            return cut(f"field {self.path!r} {self.what}", REASON_CHARACTERS_MAX)
        seen = cut(_as_text(self.value), _SHOWN_CHARACTERS_MAX)
        return cut(f"field {self.path!r} is {seen}: {self.what}", REASON_CHARACTERS_MAX)


def cut(text: str, characters_max: int) -> str:
    """Shorten a text to a number of characters, with an ellipsis where something was left out."""
    text = text.replace("\n", " ")
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"


def _as_text(value: Any) -> str:
    """Show a value as JSON has it, as far as it is JSON."""
    if isinstance(value, float | Decimal):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)
