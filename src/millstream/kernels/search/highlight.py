"""Fragments of text that show where a row matches a query.

Shown are the words for which conditions of the query are true that are not under a NOT, in the first field that has
such a word. A fragment is a part of the text as it was compared, so normalised, around the first of them. Nothing in it is
escaped: who shows it on a page escapes it, and marks what is to be shown then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.search.analyzers import normalized, raw_words
from millstream.kernels.search.compiled_queries import positive_conditions
from millstream.kernels.search.conditions import PATTERN, PHRASE, PREFIX, SEPARATOR, TERM
from millstream.kernels.search.verify import QueryVerifier

_TEXTUAL = (TERM, PHRASE, PREFIX, PATTERN)


@dataclass(frozen=True)
class Highlight:
    """The column of the fragments, the texts around a word that is shown, and about how many characters one has."""

    column: str
    before: str
    after: str
    chars: int


def fragments(
    highlight: Highlight, verifier: QueryVerifier, docs: Int64s, queries: Int64s
) -> pl.Series:
    """Return the fragment of each match; null where no word of a text field made it."""
    texts = _Texts(verifier)
    made = [
        _fragment(highlight, texts, doc, query)
        for doc, query in zip(docs.tolist(), queries.tolist(), strict=True)
    ]
    return pl.Series(highlight.column, made, dtype=pl.String)


class _Texts:
    """The words of rows that are asked for, with where they stand in the text."""

    def __init__(self, verifier: QueryVerifier) -> None:
        self.verifier = verifier
        self.documents = verifier.documents
        self._hits: dict[int, Int64s] = {}
        self._spans: dict[tuple[int, int], tuple[str, list[tuple[int, int]], int]] = {}

    def hits(self, condition: int, doc: int) -> Int64s:
        """Return the tokens of a row that a condition is true for, rising."""
        if condition not in self._hits:
            self._hits[condition] = np.sort(self.verifier.tokens(condition))
        tokens = self._hits[condition]
        # The tokens of one field stand row by row.
        first, end = np.searchsorted(self.documents.token_docs[tokens], [doc, doc + 1])
        return tokens[first:end]

    def spans(self, field: int, doc: int) -> tuple[str, list[tuple[int, int]], int]:
        """Return a text, where its words stand in it, and the number of its first token."""
        if (field, doc) not in self._spans:
            one = self.documents.fields[field]
            text = normalized(self.documents.rows[one.columns[0]].alias("t")[[doc]], one.analyzer)
            words, spans, at = raw_words(text, one.analyzer)[0].to_list(), [], 0
            for word in words:
                at = text[0].index(word, at)
                spans.append((at, at + len(word)))
                at += len(word)
            self._spans[field, doc] = text[0], spans, self._first_token(field, doc)
        return self._spans[field, doc]

    def _first_token(self, field: int, doc: int) -> int:
        start, end = np.searchsorted(self.documents.token_fields, [field, field + 1])
        return int(start + np.searchsorted(self.documents.token_docs[start:end], doc))


def _fragment(highlight: Highlight, texts: _Texts, doc: int, query: int) -> str | None:
    conditions = texts.verifier.conditions
    shown: dict[int, set[int]] = {}
    positive = positive_conditions(conditions.shape(query).split())
    for offset, is_positive in enumerate(positive):
        condition = int(conditions.starts[query]) + offset
        if not is_positive or conditions.kinds[condition] not in _TEXTUAL:
            continue
        text = conditions.text(condition)
        width = text.count(SEPARATOR) + 1 if conditions.kinds[condition] == PHRASE else 1
        for token in texts.hits(condition, doc).tolist():
            shown.setdefault(int(conditions.fields[condition]), set()).update(
                range(token, token + width)
            )
    if not shown:
        return None
    field = min(shown)
    text, spans, first = texts.spans(field, doc)
    return _cut(highlight, text, [spans[token - first] for token in sorted(shown[field])])


def _cut(highlight: Highlight, text: str, words: list[tuple[int, int]]) -> str:
    """Return the part of a text around the first word, with marks around all of the words in it."""
    middle = (words[0][0] + words[0][1]) // 2
    start = max(0, min(middle - highlight.chars // 2, len(text) - highlight.chars))
    start, end = min(start, words[0][0]), max(start + highlight.chars, words[0][1])
    start = _at_blank(text, start) if start else 0
    parts, at = [], start
    for first, last in words:
        if first < at or last > end:
            continue
        parts += [text[at:first], highlight.before, text[first:last], highlight.after]
        at = last
    end = max(at, text.rfind(" ", at, end)) if end < len(text) and " " in text[at:end] else end
    return "".join([*parts, text[at:end]]).strip()


def _at_blank(text: str, start: int) -> int:
    """Return where the word begins that a text is cut in."""
    blank = text.rfind(" ", 0, start + 1)
    return start if blank < 0 or start - blank > 20 else blank + 1
