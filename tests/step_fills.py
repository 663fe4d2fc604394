"""An app of tables, and random programs behind them; what the state of their steps says, for comparisons."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from edited_app import START, EditedApp

import millstream as ms
from millstream.kernels.given_out import HeldTable
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.state.operator_state import OperatorState
from millstream.object_store.place import DESCRIPTION, StatePlace
from millstream.ops.state_runs import state_runs
from millstream.views.schema import JOB
from millstream.views.store_location import open_state_store

SOURCE = """
from datetime import datetime

import polars as pl

import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
fields = {"ad": str, "kind": str, "cost": int, "price": float, "tags": list[str], "gone": bool, "at": datetime}
stream = app.topic("clicks", fields).stream(time="at", lateness="1 day")
latest = stream.table(key="ad", deleted=pl.col("gone"), name="latest")
latest.select("ad", "cost").view("latest")
dear = stream.filter(pl.col("cost") > 2).table(key=["kind", "cost"], deleted=pl.col("gone"), name="dear")
dear.select("kind", "cost", "ad").view("dear")
# MORE
"""
MORE = "# MORE\n"
STEPS = """
kinds = latest.group_by("kind", name="kinds").agg(n=ms.count(), most=ms.max("cost"))
kinds.view("kinds")
kinds.group_by("n", name="sizes").agg(kinds=ms.count()).view("sizes")
both = latest.join(dear.select("kind", "cost", of="ad"), on=["kind", "cost"], how="full", name="both")
both.distinct("kind", "cost", "of", name="pairs").view("pairs")
"""
EDIT = ((MORE, STEPS),)


def rows_of(count: int, seed: int, first: int = 0) -> list[dict[str, Any]]:
    """Make rows of few keys, of which some have one time, and some delete their key."""
    dice = random.Random(seed)
    return [
        {
            "ad": f"a{dice.randrange(9)}",
            "kind": dice.choice(("click", "show", "skip")),
            "cost": dice.randrange(7),
            "price": dice.choice((0.1, 0.2, 0.7, -0.0, 1e17, 3.3)),
            "tags": [dice.choice("xyz") for _ in range(dice.randrange(4))],
            "gone": dice.random() < 0.2,
            "at": START + timedelta(seconds=dice.choice((0, number)) + dice.randrange(1000) / 1000),
        }
        for number in range(first, first + count)
    ]


def began(
    folder: Path,
    partitions: int,
    rows_per_batch: int,
    rows: Iterable[dict[str, Any]],
    *edits: tuple[str, str],
    source: str = SOURCE,
) -> EditedApp:
    """Return an app that has read some rows."""
    edited = EditedApp(folder, partitions, rows_per_batch, source)
    edited.create()
    edited.append(rows)
    edited.run(edited.write(*edits))
    return edited


# ── random programs ─────────────────────────────────────────────────────────────────────────

AGGREGATES = (
    "n=ms.count()",
    'paid=ms.sum("price")',
    'mean=ms.mean("price")',
    'spread=ms.variance("price")',
    'most=ms.max("cost")',
    'least=ms.min("price")',
    'costs=ms.distinct("cost")',
    'kinds=ms.list("cost")',
    'late=ms.max("at")',
)
"""Aggregates of a table; of those the answers must be equal to the last bit."""


def program(seed: int) -> str:
    """Return declarations of a few steps behind the tables, each with a view."""
    dice = random.Random(seed)
    return "".join(_declared(dice, number) for number in range(dice.randrange(1, 4)))


def _declared(dice: random.Random, number: int) -> str:
    """Return one path: stateless steps, one or two stateful ones, and a view."""
    table = dice.choice((_narrowed(dice, "latest"), _narrowed(dice, "dear"), _joined(dice, number)))
    made = dice.choice((_grouped, _top, _distinct, _difference))(dice, table, number)
    if dice.random() < 0.4:
        made = f'{made}.group_by("kind", name="s{number} again").agg(n=ms.count(), last=ms.max("cost"))'
    return f'{made}.view("v{number}")\n'


def _narrowed(dice: random.Random, table: str) -> str:
    steps = (
        "",
        '.filter(pl.col("cost") != 3)',
        '.with_columns(price=pl.col("price") * 2)',
        '.with_columns(cost=pl.col("cost") % 3)',
    )
    return table + dice.choice(steps) + dice.choice(steps)


def _joined(dice: random.Random, number: int) -> str:
    how = dice.choice(("inner", "left", "full", "semi", "anti"))
    other = 'dear.select("kind", "cost", other="ad")'
    return f'{_narrowed(dice, "latest")}.join({other}, on=["kind", "cost"], how="{how}", name="j{number}")'


def _grouped(dice: random.Random, table: str, number: int) -> str:
    chosen = dice.sample(AGGREGATES, dice.randrange(1, 5))
    by = dice.choice(('"kind", "cost"', '"kind", "price", "cost"', '"at", "kind", "cost"'))
    names = {one.partition("=")[0] for one in chosen}
    assert len(names) == len(chosen)
    return f'{table}.group_by({by}, name="s{number}").agg({", ".join(chosen)})'


def _top(dice: random.Random, table: str, number: int) -> str:
    ties = dice.choice(("row_number", "rank", "dense_rank"))
    per = dice.choice((', per="kind"', ""))
    rows = f'{table}.distinct("kind", "cost", "price", "at", name="d{number}")'
    return f'{rows}.top({dice.randrange(1, 4)}, by="price"{per}, ties="{ties}", name="s{number}")'


def _distinct(dice: random.Random, table: str, number: int) -> str:
    columns = dice.choice(('"kind", "cost"', '"kind", "price", "cost"'))
    return f'{table}.distinct({columns}, name="s{number}")'


def _difference(dice: random.Random, table: str, number: int) -> str:
    columns = '"kind", "cost"'
    rule = dice.choice(("except_", "intersect", "union"))
    other = f"{_narrowed(dice, 'dear')}.select({columns})"
    return f'{table}.select({columns}).{rule}({other}, name="s{number}")'


# ── what state says ─────────────────────────────────────────────────────────────────────────


def tables_in_state(app: ms.App) -> dict[str, list[str]]:
    """Return the rows, with their times, that the state of each step holds that is a table, sorted."""
    found: dict[str, list[str]] = {}
    plan = app.plan(Buckets(2, 42))
    with ExitStack() as opened:
        store = opened.enter_context(open_state_store(app.state_store, readonly=True))
        place = StatePlace.from_message(store.description(app.name, DESCRIPTION))
        runs = opened.enter_context(state_runs(app.folder, place))
        manifests = [json.loads(one) for one in store.state_manifests(app.name, JOB).values()]
        for stage in plan.stages:
            for operator in stage.operators:
                if isinstance(operator.kernel, HeldTable):
                    states = [
                        OperatorState.from_message(one[operator.key], runs)
                        for one in manifests
                        if operator.key in one
                    ]
                    rows = [
                        repr(row)
                        for state in states
                        for part in operator.kernel.given_out(state, 5)
                        for row in part.iter_rows()
                    ]
                    found[operator.kernel.name] = sorted(rows)
    return found
