"""The rows of a batch as queries see them: terms and words, values, points; and the terms by which queries are found."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from millstream.kernels.arrays import Bools, Float64s, Int64s
from millstream.kernels.search.analyzers import folded, normalized, raw_words, terms_of
from millstream.kernels.search.conditions import SEPARATOR
from millstream.kernels.search.fields import SearchField
from millstream.kernels.search.geography import LEVELS, PAIR_LEVELS, cells_of
from millstream.kernels.search.necessary_terms import (
    BEGINNING_CHARS,
    BEGINNING_KIND,
    CELL_KIND,
    EVERY_ROW,
    PAIR_PATTERN,
    TERM_KIND,
    VALUE_KIND,
)
from millstream.kernels.state.keyhash import Hashes, digest_columns, mix

_ROW_BYTES = 100


@dataclass(frozen=True)
class Vocabulary:
    """Distinct texts in their order, and where each occurs: the numbers of the tokens, text by text."""

    texts: pl.Series
    of_token: Int64s  # the number of each token's text

    @classmethod
    def of(cls, tokens: pl.Series) -> Vocabulary:
        texts = tokens.unique().sort()
        numbers = tokens.cast(pl.Enum(texts)).to_physical().cast(pl.Int64)
        return cls(texts, numbers.to_numpy())

    def numbers_of(self, texts: pl.Series) -> Int64s:
        """Return the numbers of texts; -1 where one does not occur."""
        found = texts.cast(pl.Enum(self.texts), strict=False).to_physical().cast(pl.Int64)
        return found.fill_null(-1).to_numpy()

    @cached_property
    def _order(self) -> Int64s:
        return np.argsort(self.of_token, kind="stable")

    @cached_property
    def _starts(self) -> Int64s:
        return np.searchsorted(self.of_token[self._order], np.arange(len(self.texts) + 1))

    def tokens(self, first: int, end: int) -> Int64s:
        """Return the tokens whose texts have numbers in ``[first, end)``."""
        return self._order[self._starts[first] : self._starts[end]]

    @cached_property
    def _listed(self) -> list[str]:
        return self.texts.to_list()

    def beginning_with(self, text: str) -> tuple[int, int]:
        """Return the range of the numbers of the texts that begin so."""
        low = bisect_left(self._listed, text)
        return low, bisect_right(self._listed, text, low, key=lambda one: one[: len(text)])


def text_bytes(rows: pl.DataFrame, fields: Sequence[SearchField]) -> Int64s:
    """Return how much text each row has, and a little for what else it has."""
    found = np.full(rows.height, _ROW_BYTES, np.int64)
    for field in fields:
        if field.kind == "text":
            found += rows[field.columns[0]].str.len_bytes().fill_null(0).to_numpy().astype(np.int64)
    return found


@dataclass(frozen=True)
class Documents:
    """Rows, in their order, with the fields that queries may name."""

    rows: pl.DataFrame
    fields: Sequence[SearchField]

    @cached_property
    def tokens(self) -> pl.DataFrame:
        """The words of all text: field, doc (the row's number), word, term; in the order of the text, one field after the other."""
        found = [
            self._tokens(number, field)
            for number, field in enumerate(self.fields)
            if field.kind == "text"
        ]
        empty = {"doc": pl.Int64(), "word": pl.String(), "term": pl.String(), "field": pl.Int64()}
        return pl.concat([pl.DataFrame(schema=empty), *found])

    def _tokens(self, number: int, field: SearchField) -> pl.DataFrame:
        texts = normalized(self.rows[field.columns[0]].alias("t"), field.analyzer)
        words = raw_words(texts, field.analyzer)
        doc = pl.Series(np.arange(self.rows.height))
        flat = pl.DataFrame({"doc": doc, "word": words}).explode("word").drop_nulls()
        word = folded(flat["word"], field.analyzer)
        term = terms_of(word, field.analyzer)
        return pl.DataFrame({"doc": flat["doc"], "word": word, "term": term}).with_columns(
            pl.lit(number, pl.Int64).alias("field")
        )

    @cached_property
    def token_docs(self) -> Int64s:
        return self.tokens["doc"].to_numpy()

    @cached_property
    def token_fields(self) -> Int64s:
        return self.tokens["field"].to_numpy()

    @cached_property
    def terms(self) -> Vocabulary:
        """The terms, each with the number of its field before it and ``t`` between."""
        return Vocabulary.of(term_keys(self.tokens, "term"))

    @cached_property
    def words(self) -> Vocabulary:
        """The words, in the same way."""
        return Vocabulary.of(term_keys(self.tokens, "word"))

    @cached_property
    def doc_terms(self) -> Int64s:
        """Which document has which term: ``doc * count of terms + number of the term``, rising."""
        pairs = self.token_docs * max(1, len(self.terms.texts)) + self.terms.of_token
        return np.unique(pairs)

    @cached_property
    def values(self) -> Int64s:
        """The numbers of ordered fields, by field and document."""
        found = np.zeros((len(self.fields), self.rows.height), np.int64)
        for number, field in enumerate(self.fields):
            if field.kind not in ("text", "point"):
                found[number] = field.numbers(self.rows[field.columns[0]])
        return found

    @cached_property
    def comparable(self) -> Bools:
        """Where an ordered field has a value that ranges may have: not null, and not NaN."""
        found = self.present.copy()
        for number, field in enumerate(self.fields):
            if field.dtype.is_float() and field.kind == "number":
                found[number] &= ~self.rows[field.columns[0]].is_nan().fill_null(True).to_numpy()
        return found

    @cached_property
    def present(self) -> Bools:
        """Where a field has a value, by field and document; text, where it has a word."""
        found = np.zeros((len(self.fields), self.rows.height), np.bool_)
        found[self.token_fields, self.token_docs] = True
        for number, field in enumerate(self.fields):
            if field.kind == "point":
                latitudes, longitudes = self.points[number]
                there = (np.abs(latitudes) <= 90) & (np.abs(longitudes) <= 180)
                found[number] = there
            elif field.kind != "text":
                found[number] = self.rows[field.columns[0]].is_not_null().to_numpy()
        return found

    @cached_property
    def points(self) -> dict[int, tuple[Float64s, Float64s]]:
        """The latitudes and longitudes of fields that are points; NaN where there is none."""
        return {
            number: (self._degrees(field.columns[0]), self._degrees(field.columns[1]))
            for number, field in enumerate(self.fields)
            if field.kind == "point"
        }

    def _degrees(self, column: str) -> Float64s:
        return self.rows[column].cast(pl.Float64).fill_null(float("nan")).to_numpy()

    # ── by which queries are found ──────────────────────────────────────────────────────────

    def index_terms(self, seed: int) -> Iterator[tuple[Int64s, Hashes]]:
        """Yield pairs of a document and the hash of a term that it has, each once, by hash, a part of them at a time."""
        found = [*self._hashed(seed)]
        yield _distinct_pairs([(doc, hashed) for _, doc, hashed in found])
        points = [number for number, field in enumerate(self.fields) if field.kind == "point"]
        paired = [(doc, hashed) for kind, doc, hashed in found if kind in (TERM_KIND, VALUE_KIND)]
        if points and paired:
            doc, hashed = _distinct_pairs(paired)
            for number in points:
                yield from self._cell_pairs(number, doc, hashed, seed)

    def _hashed(self, seed: int) -> Iterator[tuple[str, Int64s, Hashes]]:
        for kind, doc, texts, of_row in self._indexed():
            hashed = _hashes(texts, seed)
            yield kind, doc, hashed if of_row is None else hashed[of_row]

    def _cell_pairs(
        self, number: int, doc: Int64s, hashed: Hashes, seed: int
    ) -> Iterator[tuple[Int64s, Hashes]]:
        """Yield the terms of documents together with the cells of their points, level by level: there may be many."""
        has_point = self.present[number][doc]
        doc, hashed = doc[has_point], hashed[has_point]
        for level in PAIR_LEVELS:
            at, cells = self._cells(number, level)
            of_doc = np.zeros(self.rows.height, np.uint64)
            of_doc[at] = _hashes(cells, seed)
            pairs = _pair_hashes(of_doc[doc], hashed)
            order = np.argsort(pairs)
            yield doc[order], pairs[order]

    def _indexed(self) -> Iterator[tuple[str, Int64s, pl.Series, Int64s | None]]:
        """Yield kinds of terms, documents, distinct texts, and which of these each document has; None: one each."""
        every = np.arange(self.rows.height)
        yield EVERY_ROW, every, pl.Series([EVERY_ROW]), np.zeros(self.rows.height, np.int64)
        distinct = self.doc_terms
        count = max(1, len(self.terms.texts))
        yield TERM_KIND, distinct // count, self.terms.texts, distinct % count
        begin = self.tokens.filter(pl.col("word").str.len_chars() >= BEGINNING_CHARS)
        keys = begin.select(
            pl.concat_str(
                pl.col("field"),
                pl.lit(BEGINNING_KIND),
                pl.col("word").str.slice(0, BEGINNING_CHARS),
            ).alias("key")
        ).to_series()
        beginnings = Vocabulary.of(keys)
        yield BEGINNING_KIND, begin["doc"].to_numpy(), beginnings.texts, beginnings.of_token
        for number, field in enumerate(self.fields):
            if field.kind == "point":
                for level in LEVELS:
                    yield CELL_KIND, *self._cells(number, level), None
            elif field.kind != "text":
                doc = np.flatnonzero(self.comparable[number])
                yield VALUE_KIND, doc, _keys(number, VALUE_KIND, self.values[number][doc]), None

    def _cells(self, number: int, level: int) -> tuple[Int64s, pl.Series]:
        """Return the documents that have a point, and the cell of each."""
        doc = np.flatnonzero(self.present[number])
        latitudes, longitudes = (degrees[doc] for degrees in self.points[number])
        row, column = cells_of(latitudes, longitudes, level)
        return doc, _keys(number, f"{CELL_KIND}{level}/", row, "/", column)


def term_keys(table: pl.DataFrame, column: str) -> pl.Series:
    """Return the texts of a column as terms of the field that the column ``field`` has the number of."""
    made = table.select(pl.concat_str(pl.col("field"), pl.lit(TERM_KIND), pl.col(column)))
    return made.to_series().alias("key")


def _keys(number: int, kind: str, *parts: Int64s | str) -> pl.Series:
    made = [part if isinstance(part, str) else pl.Series(part) for part in (kind, *parts)]
    literal = [pl.lit(part) for part in (str(number), *made)]
    return pl.select(pl.concat_str(literal).alias("key")).to_series()


def hash_terms(terms: pl.Series, seed: int) -> Hashes:
    """Return the hashes of necessary terms, as those of documents are: of a pair, of both of its parts."""
    is_pair = terms.str.contains(PAIR_PATTERN)
    places = is_pair.arg_true().to_numpy()
    found = _hashes(terms, seed)
    if len(places):
        parts = terms.gather(places).str.splitn(SEPARATOR, 2).struct.unnest()
        cells, others = (_hashes(part, seed) for part in parts.get_columns())
        found = found.copy()
        found[places] = _pair_hashes(cells, others)
    return found


def _hashes(terms: pl.Series, seed: int) -> Hashes:
    return digest_columns(terms.alias("term").to_frame(), ("term",), seed)


def _pair_hashes(cells: Hashes, terms: Hashes) -> Hashes:
    """Return hashes of pairs. Two that are equal by chance lead to a query that is then tried, no more."""
    return mix(cells + mix(terms))


def _distinct_pairs(pairs: Sequence[tuple[Int64s, Hashes]]) -> tuple[Int64s, Hashes]:
    """Return each pair once, by hash and then by document."""
    doc, term = (np.concatenate(both) for both in zip(*pairs, strict=True))
    order = np.lexsort((doc, term))
    doc, term = doc[order], term[order]
    first = np.ones(len(doc), np.bool_)
    first[1:] = (doc[1:] != doc[:-1]) | (term[1:] != term[:-1])
    return doc[first], term[first]
