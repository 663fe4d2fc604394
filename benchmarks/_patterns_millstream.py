"""The row patterns cep0 to cep3 on Millstream, on Spark or, with ``local`` as second argument, on the engine without a JVM.

One process runs those that it is told.

Matches go to a function that does nothing with them, or into a dataset if they are kept. Flink's ``WITHIN`` leaves out what is
just as long, so that of cep3 is a millisecond shorter here: events are at whole milliseconds.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from datetime import datetime

import polars as pl
from _nexmark_passes import Spec, run_passes

import millstream as ms

CORES = 2
PRICE = pl.col("price")
A, B, C, D, S, U = map(ms.variable, "ABCDSU")
TIME = "date_time"


@dataclass
class Bid:
    auction: int
    bidder: int
    price: int
    date_time: datetime


def averages(after_match: str) -> tuple[ms.RowPattern, dict]:
    """Return the pattern of cep1 and cep2, and its measures."""
    define = {"A": A.mean("price") < 10_000}
    measures = {
        "first_time": A.first()[TIME],
        "last_time": A.last()[TIME],
        "amount": A.mean("price"),
    }
    return ms.row_pattern("A+ B", define=define, after_match=after_match), measures


def falls_and_rises() -> tuple[ms.RowPattern, dict]:
    """Return the pattern of cep0, and its measures."""
    before = D.last(1)["price"]
    define = {
        "D": (before.is_null() & (S["price"] > PRICE)) | (before > PRICE),
        "U": before < PRICE,
    }
    measures = {"first_time": S[TIME], "last_time": U.last()[TIME], "amount": D.last()["price"]}
    return ms.row_pattern("S D+ U", define=define, after_match="to last U"), measures


def drops() -> tuple[ms.RowPattern, dict]:
    """Return the pattern of cep3, and its measures."""
    define = {"B": A["price"] - 50 < PRICE, "C": A["price"] - 50 > PRICE}
    measures = {
        "first_time": A[TIME],
        "last_time": C[TIME],
        "amount": A["price"] - C["price"],
    }
    return ms.row_pattern("A B* C", define=define, within="4999 milliseconds"), measures


PATTERNS = {
    "cep0": falls_and_rises,
    "cep1": lambda: averages("past last row"),
    "cep2": lambda: averages("to next row"),
    "cep3": drops,
}


def discard(_rows: pl.DataFrame, _context: ms.ForeachContext) -> None:
    """Do nothing with the matches."""


def main() -> None:
    spec = Spec.read()
    log = spec.folder / spec.log
    shutil.rmtree(log / "apps", ignore_errors=True)
    engine = "local" if "local" in sys.argv[2:] else "spark"
    if engine == "spark":
        ms.App("session", log=log).spark_session(cores=CORES)

    def run(query: str, number: int, kept: bool) -> None:  # noqa: FBT001 - as it is called
        app = ms.App(f"{query}-{number}", log=log)
        pattern, measures = PATTERNS[query]()
        bids = app.topic("bids", Bid).stream(
            time=TIME, watermark=ms.watermark("4 seconds", idle=None)
        )
        found = bids.match_recognize(
            pattern, partition_by=["auction", "bidder"], measures=measures, unbounded=True
        )
        if kept:
            shutil.rmtree(spec.out / query, ignore_errors=True)
            found.dataset(spec.out / query)
        else:
            found.foreach(discard)
        rows = -(-spec.records // spec.batches)
        options = {"cores": CORES} if engine == "spark" else {"engine": engine}
        app.run(until="caught-up", rows_per_batch=rows, show=False, **options)

    run_passes(spec, run)


if __name__ == "__main__":
    main()
