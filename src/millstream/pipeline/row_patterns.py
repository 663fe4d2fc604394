"""Row patterns as SQL has them: ``ms.row_pattern(…)``, for ``stream.match_recognize(…)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from millstream.durations import Duration, format_us
from millstream.errors import ConfigError
from millstream.kernels.patterns.row_operator import SkipTo
from millstream.kernels.patterns.row_pattern import (
    VARIABLES_MAX,
    Alternation,
    Anchor,
    Concatenation,
    Exclusion,
    PatternNode,
    Permutation,
    Quantified,
    Variable,
    children,
    variables_of,
)
from millstream.kernels.patterns.row_pattern_text import parse_row_pattern
from millstream.kernels.patterns.row_references import readable
from millstream.pipeline.checks import positive_us
from millstream.pipeline.expressions import Column, as_expression, names_given

_SKIPS: dict[str, SkipTo] = {
    "past last row": "past_last_row",
    "to next row": "to_next_row",
}


@dataclass(frozen=True)
class RowPattern:
    """A row pattern, as :func:`row_pattern` gives it: checked by itself, not yet against columns."""

    text: str
    node: PatternNode
    conditions: tuple[tuple[str, pl.Expr], ...]
    subsets: tuple[tuple[str, tuple[str, ...]], ...]
    within_us: int | None
    skip: SkipTo
    skip_to: str | None

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables of the pattern, in the order of its text."""
        return variables_of(self.node)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that rows may be asked for: of variables and subsets."""
        return (*self.variables, *(name for name, _ in self.subsets))

    def explain(self) -> str:
        """Draw the pattern as text: its parts, in the order in which they are preferred, and what is around them."""
        lines = [f"pattern: {self.text}", *_drawn(self.node, dict(self.conditions), "  ")]
        lines += [f"subset {name}: {', '.join(members)}" for name, members in self.subsets]
        within = "without end" if self.within_us is None else format_us(self.within_us)
        skip = self.skip.replace("_", " ") + (f" {self.skip_to}" if self.skip_to else "")
        return "\n".join([*lines, f"within: {within}", f"after match: skip {skip}"])


def row_pattern(
    pattern: str,
    *,
    define: Mapping[str, Column] | None = None,
    subset: Mapping[str, Sequence[str]] | None = None,
    after_match: str = "past last row",
    within: Duration | None = None,
) -> RowPattern:
    """Declare a row pattern of SQL's ``MATCH_RECOGNIZE``, for :meth:`Stream.match_recognize`.

    ::

        b, c = ms.variable("B"), ms.variable("C")
        falls_and_rises = ms.row_pattern(
            "A B+ C+",
            define={
                "B": pl.col("price") < b.prev()["price"],
                "C": pl.col("price") > c.prev()["price"],
            },
            within="1 hour",
        )

    Args:
        pattern: As SQL writes it: variables one after the other, ``|``, ``( )``, ``PERMUTE(A, B)``, ``{- A -}`` (matched, not emitted),
            ``^``, ``$``, ``()`` and the quantifiers ``* + ? {n} {n,} {,m} {n,m}``, with a ``?`` after them reluctant.
        define: The conditions of variables: expressions of polars over the row, and over matched rows (:func:`variable`). Null is false.
            A variable without one fits any row.
        subset: Names for several variables together, such as ``{"U": ["A", "B"]}``.
        after_match: Where the next match may begin: ``"past last row"``, ``"to next row"``, ``"to first B"`` or ``"to last B"``
            (``"to B"`` is the same).
        within: How much later than the first row of a match the last one may be; just as much is within.

    Of the matches that begin with a row, the first one by the standard's preference is the match.

    Raises:
        ConfigError: the pattern's text is none (the message shows where), or names do not fit.
    """
    node = parse_row_pattern(pattern)
    variables = variables_of(node)
    if not variables:
        raise ConfigError(f'The pattern {pattern!r} has no variable. Name one: "A".')
    if len(variables) > VARIABLES_MAX:
        raise ConfigError(
            f"The pattern has {len(variables)} variables; at most {VARIABLES_MAX} are allowed. Match the matches of a first pattern."
        )
    conditions = tuple(
        (name, as_expression(given, what=f"The condition of {name!r}"))
        for name, given in (define or {}).items()
    )
    for name, _ in conditions:
        _require_variable("define", name, variables)
    subsets = tuple(_subset(name, members, variables) for name, members in (subset or {}).items())
    skip, skip_to = _skip(after_match, [*variables, *(name for name, _ in subsets)])
    within_us = None if within is None else positive_us(within, "within")
    return RowPattern(pattern, node, conditions, subsets, within_us, skip, skip_to)


def _require_variable(what: str, name: object, variables: Sequence[str]) -> None:
    if name not in variables:
        raise ConfigError(
            f"{what} names the variable {name!r}. The pattern has {', '.join(variables)}."
        )


def _subset(
    name: str, members: Sequence[str], variables: Sequence[str]
) -> tuple[str, tuple[str, ...]]:
    if not isinstance(name, str) or not name.isidentifier() or name in variables:
        raise ConfigError(
            f'A subset is called {name!r}. Give a name that is not a variable of the pattern, such as "U".'
        )
    found = names_given(members, f"The subset {name!r}")
    if not found:
        raise ConfigError(
            f"The subset {name!r} has no variable. Give some of {', '.join(variables)}."
        )
    for member in found:
        _require_variable(f"The subset {name!r}", member, variables)
    return name, tuple(dict.fromkeys(found))


def _skip(given: object, names: Sequence[str]) -> tuple[SkipTo, str | None]:
    words = given.split() if isinstance(given, str) else []
    plain = " ".join(words).lower()
    if plain in _SKIPS:
        return _SKIPS[plain], None
    if len(words) in (2, 3) and words[0].lower() == "to" and words[-1] in names:
        to = words[1].lower() if len(words) == 3 else "last"
        if to in ("first", "last"):
            return ("to_first" if to == "first" else "to_last"), words[-1]
    raise ConfigError(
        f'after_match is {given!r}. Give "past last row", "to next row", "to first X" or "to last X", with X one of '
        f"{', '.join(names)}."
    )


# ── drawing ─────────────────────────────────────────────────────────────────────────────────


def _drawn(node: PatternNode, conditions: Mapping[str, pl.Expr], indent: str) -> Iterator[str]:
    quantifier = ""
    if isinstance(node, Quantified) and not isinstance(node.part, Quantified):
        quantifier, node = f" {_quantifier(node)}", node.part
    if isinstance(node, Variable):
        condition = conditions.get(node.name)
        said = "any row" if condition is None else readable(condition)
        yield f"{indent}{node.name}{quantifier}: {said}"
        return
    heading = _heading(node)
    if heading or quantifier:
        yield f"{indent}{heading or 'in order'}{quantifier}"
        indent += "  "
    for number, part in enumerate(children(node)):
        if number and isinstance(node, Alternation):
            yield f"{indent[:-2]}or"
        yield from _drawn(part, conditions, indent)


def _heading(node: PatternNode) -> str:
    if isinstance(node, Anchor):
        return "before the first row" if node.at == "^" else "after the last row"
    if isinstance(node, Quantified):
        return f"in order {_quantifier(node)}"
    if isinstance(node, Concatenation):
        return "" if node.parts else "nothing"
    return {Alternation: "either", Permutation: "in any order", Exclusion: "not emitted"}[
        type(node)
    ]


def _quantifier(node: Quantified) -> str:
    most = "any number" if node.most is None else str(node.most)
    count = str(node.least) if node.least == node.most else f"{node.least} to {most}"
    return f"({count} times, {'as few as possible' if node.reluctant else 'as many as possible'})"
