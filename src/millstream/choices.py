"""Options with a few allowed values: every parameter refuses other values in the same way.

Errors name the nearest allowed value, for parameters as for topics, views, columns and apps.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

from millstream.errors import ConfigError

Word = TypeVar("Word", bound=str)


def choose(what: str, given: object, allowed: Sequence[Word], remedy: str = "") -> Word:
    """Return the word that was given, which is one of those allowed.

    Raises:
        ConfigError: it is not; the message begins with ``what``, names the nearest, and ends with the remedy.
    """
    # A user's type may override ==: an expression is never false.
    if not isinstance(given, str) or given not in allowed:
        near = did_you_mean(given, allowed) if isinstance(given, str) else ""
        raise ConfigError(f"{what} is {given!r}. Choose {format_choices(allowed)}.{near}{remedy}")
    return cast("Word", given)


def format_choices(allowed: Sequence[str]) -> str:
    """Write words as a choice: ``"a", "b" or "c"``."""
    quoted = [f'"{word}"' for word in allowed]
    return " or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Ask, as a sentence, whether the nearest name was meant; empty if none is near."""
    near = nearest(given, names)
    return "" if near is None else f" Did you mean {near!r}?"


def nearest(given: str, names: Iterable[str]) -> str | None:
    """Return the name that is nearest to the one given, if any is near."""
    plain = {_plain(name): name for name in names}
    found = difflib.get_close_matches(_plain(given), plain, n=1)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.casefold().replace("_", "-").replace(" ", "-")
