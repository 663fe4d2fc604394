"""Nexmark on Millstream. One process runs the queries that it is told.

Results go to a view, or, for the queries in the setting ``discard``, to a function that does nothing
with them: the end of the way for us, as a blackhole is for Flink and ``noop`` for Spark. Views,
positions and books are committed with every batch in either case. The joins q3, q20 and q23 have no key, as
their bids have none, so there is no view of them. What is to be checked of these, and of the queries row by row, goes
into a dataset. Those of q10 do so in any case: it is files by day and minute.
"""

from __future__ import annotations

import shutil

import polars as pl
from _nexmark_answers import in_form
from _nexmark_passes import Spec, run_passes
from _nexmark_queries import Queries

import millstream as ms

CORES = 2
KEYLESS = (
    *("q0", "q1", "q2", "q10", "q13", "q14", "q21", "q22"),
    *("q3", "q20", "q23"),
)
KEYS = {"q5": ("window_end", "auction"), "q7": "window_start"}


def discard(_rows: pl.DataFrame, _context: ms.ForeachContext) -> None:
    """Do nothing with the rows."""


def end(rows: ms.Stream | ms.Table, query: str, spec: Spec, *, kept: bool) -> None:
    """Say where the results go."""
    if query == "q10":
        rows.dataset(spec.out / query, partition_by=("day", "minute"))
    elif kept and query in KEYLESS:
        rows.dataset(spec.out / query)
    elif query in KEYLESS or (not kept and query in spec.discard):
        rows.foreach(discard)
    else:
        rows.view(query, key=KEYS.get(query))


def answer(query: str, spec: Spec, app: str) -> pl.DataFrame:
    """Read what a query gave, in the form of the answers."""
    if query in KEYLESS:
        rows = ms.dataset(spec.out / query).scan().collect()
    else:
        rows = ms.view(query, log=spec.folder / spec.log, app=app).scan()
    return in_form(query, rows)


def main() -> None:
    spec = Spec.read()
    log = spec.folder / spec.log
    shutil.rmtree(log / "apps", ignore_errors=True)
    # Spark stays up between the queries, as it does where several apps run in one program.
    ms.App("session", log=log).spark_session(cores=CORES)

    def run(query: str, number: int, kept: bool) -> None:  # noqa: FBT001 - as it is called
        shutil.rmtree(spec.out / query, ignore_errors=True)
        app = ms.App(f"{query}-{number}", log=log)
        end(getattr(Queries(app), query)(), query, spec, kept=kept)
        rows = -(-spec.records // spec.batches)
        app.run(until="caught-up", cores=CORES, rows_per_batch=rows, show=False)
        if kept:
            answer(query, spec, app.name).write_parquet(spec.out / f"{query}.parquet")

    run_passes(spec, run)


if __name__ == "__main__":
    main()
