"""Row patterns over bids of an auction, beside PyFlink's MATCH_RECOGNIZE: cep0 to cep3 of the Nexmark project.

    python benchmarks/patterns.py [--events 50000] [--batches 4] [--rounds 1] [--queries cep0,cep1,cep2,cep3]
        [--flink-python PATH] [--cache FOLDER] [--only millstream] [--local]

cep0: a price of a bidder in an auction that falls, and rises again. cep1 and cep2: the longest runs of bids whose mean price is below
10,000, past the last row or to the next one. cep3: a price that drops by more than 50 within 5 seconds (``A B* C``).

Bids are those of ``nexmark.py``, but one each millisecond: so their order is that of time alone, and matches are the same in every
engine. Each engine is one process, reads the same JSON (ours from the log, Flink from files) and takes each query twice: the first
pass keeps the matches, which are compared, and the second is measured. At the end comes one bid an hour later in each part, which
lets the time of all others pass. CPU seconds are of the whole process tree. ``--local`` also takes our engine without a JVM,
one process as Flink's is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import polars as pl
from _measure import spread, table
from _nexmark_events import START_MS, as_json, bids
from _nexmark_passes import Spec
from nexmark import flink_python, run_measured

HERE = Path(__file__).parent
QUERIES = ("cep0", "cep1", "cep2", "cep3")
PARTS = 2
COLUMNS = ("auction", "bidder", "first_ms", "last_ms", "amount")
_TIME = "%Y-%m-%dT%H:%M:%S%.3fZ"


def made_input(cache: Path, events: int) -> Path:
    """Write the bids to files and a log, unless they are there; return the folder."""
    import millstream as ms

    folder = cache / f"patterns-{events}"
    if (folder / "made").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "flink").mkdir(parents=True)
    at = pl.int_range(START_MS, START_MS + events, eager=True).cast(pl.Datetime("ms"))
    frame = bids(events * 2, 0)[:events].select("auction", "bidder", "price")
    frame = frame.with_columns(at.dt.strftime(_TIME).alias("date_time"))
    later = pl.Series([START_MS + events + 3_600_000]).cast(pl.Datetime("ms")).dt.strftime(_TIME)
    with ms.connect(folder / "log") as log:
        log.create_topic("bids", partitions=PARTS)
        with log.producer() as producer:
            for part in range(PARTS):
                last = pl.DataFrame({"auction": [-1], "bidder": [part], "price": [0]})
                mine = pl.concat([frame[part::PARTS], last.with_columns(date_time=later)])
                lines = as_json(mine)
                for line in lines:
                    producer.send("bids", line.as_py(), partition=part)
                text = b"".join(line.as_py() + b"\n" for line in lines)
                (folder / "flink" / f"{part}.json").write_bytes(text)
    (folder / "made").touch()
    return folder


def matches(engine: str, query: str, out: Path) -> pl.DataFrame:
    """Read the matches that an engine has kept."""
    if engine == "flink":
        lines = [line for part in (out / f"flink-{query}").rglob("*part-*") for line in part.open()]
        types = dict.fromkeys(("auction", "bidder", "amount"), pl.Int64)
        found = pl.DataFrame(
            [json.loads(line) for line in lines],
            schema={**types, "first_time": pl.String, "last_time": pl.String},
        )
        for name in ("first", "last"):
            text = pl.col(f"{name}_time").str.replace(" ", "T").str.strip_suffix("Z")
            found = found.with_columns(
                text.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f").alias(f"{name}_time")
            )
    else:
        import millstream as ms

        found = ms.dataset(out / query).scan().collect()
    found = found.with_columns(
        pl.col("first_time").dt.epoch("ms").alias("first_ms"),
        pl.col("last_time").dt.epoch("ms").alias("last_ms"),
        pl.col("amount").floor().cast(pl.Int64),  # AVG of BIGINT is a BIGINT in Flink
    )
    return found.select(COLUMNS).sort(COLUMNS)


def compared(query: str, folder: Path, engines: list[str]) -> str:
    """Say whether all engines have the same matches."""
    first, *others = engines
    ours = matches(first, query, folder / f"out-{first}")
    said = [f"{query}: {ours.height:,} matches"]
    for engine in others:
        theirs = matches(engine, query, folder / f"out-{engine}")
        if ours.equals(theirs):
            said.append(f"{engine}: the same")
            continue
        added, missing = (
            a.join(b, on=COLUMNS, how="anti") for a, b in ((ours, theirs), (theirs, ours))
        )
        said.append(
            f"{engine} {theirs.height:,}: only {first} {added.height:,}, such as {added.head(3).rows()}; "
            f"only {engine} {missing.height:,}, such as {missing.head(3).rows()}"
        )
    return "; ".join(said)


def command(engine: str, python: str, spec: Spec) -> list[str]:
    """Return what runs an engine's passes."""
    program = HERE / ("_patterns_flink.py" if engine == "flink" else "_patterns_millstream.py")
    return [python, str(program), spec.to_argument(), *(["local"] if engine == "local" else [])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--events", type=int, default=50_000)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--queries", default=",".join(QUERIES))
    parser.add_argument("--flink-python")
    parser.add_argument("--cache", type=Path, default=Path("benchmark-cache"))
    parser.add_argument("--only", choices=("millstream", "local", "flink"))
    parser.add_argument("--local", action="store_true")
    options = parser.parse_args()
    engines = ["millstream", *(["local"] if options.local else []), "flink"]
    engines = [options.only] if options.only else engines
    pythons = dict.fromkeys(engines, sys.executable)
    if "flink" in engines:
        pythons["flink"] = flink_python(options)
    folder, queries = made_input(options.cache, options.events), options.queries.split(",")
    cpu: dict[tuple[str, str], list[float]] = {}
    for round_number in range(options.rounds):
        kinds = [(query, kept) for kept in (True, False) for query in queries]
        for engine in engines if round_number % 2 == 0 else engines[::-1]:
            out = folder / f"out-{engine}"
            out.mkdir(exist_ok=True)
            spec = Spec(folder, "log", out, kinds, options.batches, options.events, [])
            passes, _ = run_measured(command(engine, pythons[engine], spec))
            for one in passes:
                print(f"  {engine} {one['query']}: {one['cpu_s']:.2f} CPU-s", flush=True)
                if not one["kept"]:
                    cpu.setdefault((engine, one["query"]), []).append(one["cpu_s"])
    if len(engines) > 1:
        for query in queries:
            print(compared(query, folder, engines))
    report(options.events, queries, engines, cpu)


def report(
    events: int, queries: list[str], engines: list[str], cpu: dict[tuple[str, str], list[float]]
) -> None:
    """Print a table for each of our engines."""
    titles = {"millstream": "on Spark", "local": "without a JVM", "flink": "Flink"}
    for engine in [one for one in engines if one != "flink"] or ["flink"]:
        rows = []
        for query in queries:
            ours, theirs = cpu.get((engine, query), []), cpu.get(("flink", query), [])
            ratios = [b / a for a, b in zip(ours, theirs, strict=False)]
            rate = [events / one for one in ours]
            columns = (ours, theirs, rate, ratios)
            rows.append([query, *(spread(one) if one else "-" for one in columns)])
        header = ["query", "ours, CPU-s", "Flink, CPU-s", "ours, events per CPU-s", "Flink / ours"]
        table(f"{events:,} events, second pass, {titles[engine]}", header, rows)


if __name__ == "__main__":
    main()
