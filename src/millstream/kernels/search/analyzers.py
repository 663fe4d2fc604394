"""Analyzers: from text to the terms by which it is found.

==============  ================================  ======================================
analyzer        words                             terms
==============  ================================  ======================================
``keyword``     the whole value, as it is         the same
``whitespace``  what blanks divide, as it is      the same
``standard``    letters and digits that stand     the same
                together, normalised (NFKC), in
                lower case
a language      the same                          stems of the words
==============  ================================  ======================================

Rows and queries go through the same functions. An apostrophe within a word belongs to it. A sigma is the same at the end
of a word and within it: which of them a capital one becomes depends on what follows, and of a beginning nothing does.

Source: NFKC is Unicode's normalisation form KC (UAX #15); of sigmas as by Unicode's case folding; stems are those of Snowball (Porter, 2001).
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module, metadata
from threading import local
from typing import Any

import polars as pl

from millstream.errors import ConfigError

LANGUAGES = (
    "danish",
    "dutch",
    "english",
    "finnish",
    "french",
    "german",
    "hungarian",
    "italian",
    "norwegian",
    "portuguese",
    "romanian",
    "russian",
    "spanish",
    "swedish",
    "turkish",
)
ANALYZERS = ("standard", "keyword", "whitespace", *LANGUAGES)

_APOSTROPHE = "\u2019"  # the typographic one
_FINAL_SIGMA, _SIGMA = "\u03c2", "\u03c3"
_SPELLINGS = {_APOSTROPHE: "'", _FINAL_SIGMA: _SIGMA}
_WORD = rf"[\p{{L}}\p{{M}}\p{{N}}_]+(?:['{_APOSTROPHE}][\p{{L}}\p{{M}}\p{{N}}_]+)*"
_STEMS_KEPT = 1 << 18
_stemmers = local()  # a stemmer has state while it works, so each thread has its own


def stemmer_release(analyzer: str) -> str:
    """Return the release of the library that makes an analyzer's stems; "" if it makes none.

    Raises:
        ConfigError: the library is not installed.
    """
    if analyzer not in LANGUAGES:
        return ""
    try:
        return f"snowballstemmer {metadata.version('snowballstemmer')}"
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f'The analyzer "{analyzer}" needs the package snowballstemmer: pip install "millstream[search]". '
            'Or say "standard", which takes words as they are.'
        ) from None


def normalized(texts: pl.Series, analyzer: str) -> pl.Series:
    """Return texts as their words stand in them."""
    if analyzer in ("keyword", "whitespace"):
        return texts
    return texts.str.normalize("NFKC")


def raw_words(texts: pl.Series, analyzer: str) -> pl.Series:
    """Return lists of the words of normalised texts, in their order and as they are written."""
    if analyzer == "keyword":
        return texts.to_frame("t").select(pl.concat_list("t")).to_series()
    return texts.str.extract_all(r"\S+" if analyzer == "whitespace" else _WORD)


def folded(words: pl.Series, analyzer: str) -> pl.Series:
    """Return words, or the text of a pattern, as they are compared."""
    if analyzer in ("keyword", "whitespace"):
        return words
    found = words.str.normalize("NFKC").str.to_lowercase()
    for char, meant in _SPELLINGS.items():
        found = found.str.replace_all(char, meant, literal=True)
    return found


def one_spelling(expression: str, analyzer: str) -> str:
    """Return a regular expression with the characters that folded words have."""
    if analyzer not in ("keyword", "whitespace"):
        for char, meant in _SPELLINGS.items():
            expression = expression.replace(char, meant)
    return expression


def terms_of(words: pl.Series, analyzer: str) -> pl.Series:
    """Return the terms of folded words."""
    if analyzer not in LANGUAGES:
        return words
    distinct = words.unique()
    stems = pl.Series([_stem(analyzer, word) for word in distinct.to_list()], dtype=pl.String)
    return words.replace_strict(distinct, stems)


@lru_cache(maxsize=_STEMS_KEPT)
def _stem(language: str, word: str) -> str:
    made: dict[str, Any] = _stemmers.__dict__
    if language not in made:
        made[language] = import_module("snowballstemmer").stemmer(language)
    return str(made[language].stemWord(word))
