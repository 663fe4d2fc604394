"""Stored searches in plain Python, for tests: queries as trees, their text, and which rows they match.

Made from the rule as users read it. It shares nothing with the step: it tries every query on every row, and reads no
query's text.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

WORDS = ["ab", "abc", "abcd", "abce", "bca", "cab", "cabin", "Ü", "don't", "12"]


def words_of(text):
    return [] if text is None else re.findall(r"\w+(?:'\w+)*", text.lower())


def is_near(row, latitude, longitude, metres):
    if row["lat"] is None or row["lon"] is None:
        return False
    one, other = math.radians(row["lat"]), math.radians(latitude)
    cosine = math.sin(one) * math.sin(other) + math.cos(one) * math.cos(other) * math.cos(
        math.radians(row["lon"] - longitude)
    )
    return math.acos(max(-1.0, min(1.0, cosine))) * 6_371_008.8 <= metres


def is_inside(row, corners):
    """Count the edges that a ray to the east crosses, in fractions."""
    if row["lat"] is None or row["lon"] is None:
        return False
    y, x = Fraction(row["lat"]), Fraction(row["lon"])
    crossed = 0
    for one, other in zip(corners, [*corners[1:], corners[0]], strict=True):
        (y1, x1), (y2, x2) = (tuple(map(Fraction, corner)) for corner in (one, other))
        if min(y1, y2) <= y < max(y1, y2) and x1 + (x2 - x1) * (y - y1) / (y2 - y1) > x:
            crossed += 1
    return crossed % 2 == 1


def matches(query, row):
    """Return whether a row matches a query."""
    what, *rest = query
    if what == "all":
        return True
    if what == "not":
        return not matches(rest[0], row)
    if what in ("and", "or", "least"):
        count, parts = rest
        return sum(matches(part, row) for part in parts) >= count
    field, *args = rest
    if what == "range":
        low, low_in, high, high_in = args
        value = row[field]
        if value is None:
            return False
        above = low is None or value > low or (low_in and value == low)
        return above and (high is None or value < high or (high_in and value == high))
    if what == "near":
        return is_near(row, *args)
    if what == "inside":
        return is_inside(row, *args)
    if what == "exists":
        return bool(words_of(row[field])) if isinstance(row[field], str) else row[field] is not None
    fields = [field] if field else ["title", "body"]
    return any(matches_text(what, row[one], args[0]) for one in fields)


def matches_text(what, text, wanted):
    words = words_of(text)
    if what == "term":
        return wanted.lower() in words
    if what == "phrase":
        wanted = [word.lower() for word in wanted]
        return any(words[at : at + len(wanted)] == wanted for at in range(len(words)))
    if what == "wild":
        expression = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in wanted)
        return any(re.fullmatch(expression, word) for word in words)
    return any(re.fullmatch(wanted, word) for word in words)  # a regular expression


def text_of(query):
    """Return the text of a query."""
    what, *rest = query
    if what == "all":
        return "*:*"
    if what == "not":
        return f"NOT ({text_of(rest[0])})"
    if what in ("and", "or", "least"):
        count, parts = rest
        texts = [f"({text_of(part)})" for part in parts]
        if what == "least":
            return f"AT LEAST {count} OF ({', '.join(texts)})"
        return (" " if what == "and" else " OR ").join(texts)
    field, *args = rest
    begin = f"{field}:" if field else ""
    if what == "range":
        return begin + range_text(*args)
    if what == "near":
        return begin + "near({} {} {}m)".format(*args)
    if what == "inside":
        return begin + "inside({})".format(", ".join(f"{lat} {lon}" for lat, lon in args[0]))
    if what == "exists":
        return f"{begin}*"
    wanted = args[0]
    if what == "phrase":
        return begin + '"' + " ".join(wanted) + '"'
    return begin + (f"/{wanted}/" if what == "regex" else wanted)


def range_text(low, low_in, high, high_in):
    if low is not None and low == high and low_in and high_in:
        return str(low)
    if high is None and low is not None:
        return f"{'>=' if low_in else '>'}{low}"
    begin, end = "[" if low_in else "{", "]" if high_in else "}"
    return f"{begin}{'*' if low is None else low} TO {'*' if high is None else high}{end}"
