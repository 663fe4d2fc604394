"""Q: process functions. When rows and timers are called, and what their state is then; the rule is docs/process.md's."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import polars as pl
from cases.case import LONG, ORIGIN, Answer, Case, Reach, event

import millstream as ms

CALLS = {"key": pl.String, "call": pl.String, "at": pl.Datetime("us", "UTC")}


class Calls(ms.ProcessFunction):
    """Emits each call with the ids that came so far; ``n`` seconds after a row it sets a timer, if that is not 1."""

    ids = ms.list_state(pl.String)
    counts = ms.map_state(pl.String, pl.Int64)

    def on_row(self, context: ms.ProcessContext, row: dict[str, Any]) -> None:
        context.state.ids.append(row["id"])
        self.emit(context, row["id"])
        if row["n"] != 1:
            context.set_timer(context.time + timedelta(seconds=row["n"]))
        letter = row["id"][0]
        context.state.counts[letter] = context.state.counts.get(letter, 0) + 1
        if context.state.counts[letter] == 2:
            context.emit({"key": row["key"], "letter": letter}, to="twice")

    def on_timer(self, context: ms.ProcessContext, time: datetime) -> None:
        self.emit(context, f"timer {(time - ORIGIN).total_seconds():g}")
        if len(context.state.ids) > 3:
            context.state.ids.clear()
            context.set_timer(time + timedelta(seconds=100))

    def emit(self, context: ms.ProcessContext, call: str) -> None:
        text = f"{call}: {' '.join(context.state.ids)}"
        context.emit({"key": context.key["key"], "call": text, "at": context.time})


def called(stream: ms.Stream, name: str) -> Mapping[str, ms.Stream]:
    made = stream.process(
        Calls(),
        by="key",
        schema=CALLS,
        side_outputs={"twice": {"key": pl.String, "letter": pl.String}},
        name=f"{name}/calls",
    )
    return {"calls": made, "twice": made.side_output("twice")}


CASES = [
    Case(
        "Q1",
        "rows by time, timers before the rows at their time, in the past and without a row",
        [
            event(3, id="c"),
            event(1, 4, id="a"),
            event(2, -2, id="b1"),
            event(5, id="d"),
            event(5, 0, key="b", id="e"),
            Reach(LONG),
        ],
        called,
        {
            "calls": Answer(
                "key call at",
                [
                    ("a", "a: a", 1.0),
                    ("a", "b1: a b1", 2.0),
                    ("a", "timer 0: a b1", 2.0),
                    ("a", "c: a b1 c", 3.0),
                    ("a", "timer 5: a b1 c", 5.0),
                    ("a", "d: a b1 c d", 5.0),
                    ("b", "e: e", 5.0),
                    ("b", "timer 5: e", 5.0),
                ],
                key=("key", "call"),
            ),
            "twice": Answer("key letter", [], key=("key", "letter")),
        },
        delay=10,
    ),
    Case(
        "Q2",
        "a timer clears state and sets another, and a side output",
        [
            event(1, id="a1"),
            event(3, id="a2"),
            event(4, id="b1"),
            event(5, 3, id="b2"),
            Reach(LONG),
        ],
        called,
        {
            "calls": Answer(
                "key call at",
                [
                    ("a", "a1: a1", 1.0),
                    ("a", "a2: a1 a2", 3.0),
                    ("a", "b1: a1 a2 b1", 4.0),
                    ("a", "b2: a1 a2 b1 b2", 5.0),
                    ("a", "timer 8: a1 a2 b1 b2", 8.0),
                    ("a", "timer 108: ", 108.0),
                ],
                key=("key", "call"),
            ),
            "twice": Answer("key letter", [("a", "a"), ("a", "b")], key=("key", "letter")),
        },
    ),
]
