"""Nexmark on Millstream, PyFlink's SQL and plain PySpark, on one seeded input, answers checked first.

    python benchmarks/nexmark.py [--events 1000000] [--rounds 3] [--peers flink,spark]
        [--queries q0,q1,…] [--batches 20] [--views q5,q17]
        [--input json|columnar] [--cache FOLDER] [--flink-python PATH] [--no-check]

The queries are all of Nexmark's, q0 to q23: row by row q0 (bids as they are), q1 (prices in another currency), q2
(filter), q10 (files by day and minute), q13 (look-up in a bounded side input), q14 (calculation), q21 (regular
expression), q22 (split); windows q5 (auctions with most bids, per hop of 10 s every 2 s), q7 (highest bid per 10 s), q8
(persons who opened an auction in the ten seconds in which they joined), q11 (sessions of bidders), q12 (bids per
bidder and 10 s of processing time); groups q15, q16 (counts and distinct counts per day, and per channel and day), q17
(statistics per auction and day), q18 (last bid per bidder and auction), q19 (ten highest bids per auction); joins
without bound q3 (auctions with sellers), q4 (mean winning price per category), q6 (the same of a seller's last ten),
q9 (winning bids), q20 (bids with auctions), q23 (bids with persons and auctions). q8 is written without a join:
persons and sellers are counted together per person and window, which gives the same rows. Plain Spark has those
of its ten queries that it had before joins came: q0, q1, q2, q5, q7, q8, q11, q12, q17, q18.

Input. Bids, auctions and persons are three streams, as JSON: for us in a log of four partitions, for
the others in files. With `--input columnar`, the segments of our log have been archived as columns
beforehand, which we read instead of the JSON; the others read JSON as ever. What filling the log takes is
told apart. Millstream and plain Spark read in
`--batches` batches of the same size; Flink reads on and on, with a checkpoint every 10 s.

Output. All throw away what comes out: Flink into `blackhole`, Spark into `noop`, ours into a function
that does nothing, called where the job was started. Of the queries in `--views` ours keeps a view, which can be read
afterwards: that is a real output, more than the others do.

What is measured. CPU seconds and wall time of the whole process tree, and its memory (the most PSS
seen, every two seconds). A process runs a group of queries, each twice: the first pass warms up, the
second counts. Its very first pass, q0, counts as the cold run, with the start of the engine. The
marginal cost of a query is its CPU less that of q0 in the same process: what it costs beside reading
and decoding. Engines take turns (A B C, C B A, …).

In the first round the first pass keeps its results, which must equal what polars works out from the
same rows; see `_nexmark_expected.py` for what is compared. Where an engine gives another answer, its
times do not count.

Flink needs an environment of its own, of 850 MB: it is made in the cache folder with pip, unless
`--flink-python` names the Python of one that has apache-flink 2.3. Its q13 needs `javac`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
from _measure import spread, table, tree_memory_mib
from _nexmark_answers import COLUMNS
from _nexmark_expected import difference, excess
from _nexmark_flink_rows import flink_answer
from _nexmark_input import LOGS, Input, prepared
from _nexmark_passes import Spec

HERE = Path(__file__).parent
_SAMPLED_S = 2.0  # to add up the memory of a JVM costs tens of milliseconds
FLINK = "apache-flink==2.3.0"
GROUPS = (
    ("q0", "q1", "q2", "q5", "q7", "q8"),
    ("q11", "q12", "q17", "q18"),
    ("q10", "q13", "q14", "q21", "q22"),
    ("q15", "q16", "q19"),
    ("q3", "q4", "q6", "q9"),
    ("q20", "q23"),
)
HAVE = {
    "flink": {*COLUMNS} - {"q6"} - (set() if shutil.which("javac") else {"q13"}),
    "spark": {"q0", "q1", "q2", "q5", "q7", "q8", "q11", "q12", "q17", "q18"},
}


@dataclass
class Bench:
    """One run of the benchmark: the input, the engines, and what was measured."""

    options: argparse.Namespace
    made: Input
    pythons: dict[str, str]
    wrong: dict[tuple[str, str], str] = field(default_factory=dict)
    passes: list[dict] = field(default_factory=list)
    memory_mib: dict[str, list[float]] = field(default_factory=dict)

    def measure(self) -> None:
        """Run the rounds."""
        engines = list(self.pythons)
        for number in range(self.options.rounds):
            for group in GROUPS:
                for engine in engines if number % 2 == 0 else engines[::-1]:
                    queries = [query for query in group if self._is_wanted(engine, query)]
                    if queries:
                        self._measure(engine, queries, number)

    def _is_wanted(self, engine: str, query: str) -> bool:
        has = query in HAVE.get(engine, COLUMNS)
        return has and query in self.options.queries and (engine, query) not in self.wrong

    def _measure(self, engine: str, queries: list[str], number: int) -> None:
        """Run a group of queries: q0 cold and warm, then each to be checked or to warm up, and warm."""
        checked = number == 0 and not self.options.no_check
        plan = [("q0", "cold"), ("q0", "warm")]
        if queries[0] == "q0" and checked:
            plan.insert(1, ("q0", "kept"))
        for query in queries:
            if query != "q0":
                plan += [(query, "kept" if checked else "first"), (query, "warm")]
        with tempfile.TemporaryDirectory(prefix="nexmark-", dir=self.options.cache) as name:
            passes, memory = self._run(engine, plan, Path(name))
            if checked:
                for query in queries:
                    self._check(engine, query, Path(name))
        self.memory_mib.setdefault(engine, []).append(memory)
        base = next(p["cpu_s"] for p, (_, kind) in zip(passes, plan, strict=True) if kind == "warm")
        for one, (query, kind) in zip(passes, plan, strict=True):
            if (engine, query) not in self.wrong:
                marginal = one["cpu_s"] - base
                self.passes.append({**one, "engine": engine, "kind": kind, "marginal_s": marginal})
            print(
                f"  round {number + 1} {engine} {query} {kind}: {one['cpu_s']:.2f} CPU-s, "
                f"{one['wall_s']:.2f} s",
                flush=True,
            )

    def _check(self, engine: str, query: str, out: Path) -> None:
        """Compare what an engine answered with what is right."""
        if engine == "flink":
            found = flink_answer(query, out / f"flink-{query}")
        else:
            found = pl.read_parquet(out / f"{query}.parquet")
        if (engine, query) == ("flink", "q12"):
            wrong = excess(found, self.made)
        else:
            wrong = difference(query, found, self.made)
        print(f"  {engine} {query}: {wrong or 'equal'}", flush=True)
        if wrong:
            self.wrong[engine, query] = wrong

    def _run(self, engine: str, plan: list[tuple[str, str]], out: Path) -> tuple[list[dict], float]:
        spec = Spec(
            folder=self.made.folder,
            log=LOGS[self.options.input],
            out=out,
            passes=[(query, kind == "kept") for query, kind in plan],
            batches=self.made.batches,
            records=self.made.bids,
            discard=[one for one in COLUMNS if one not in self.options.views],
        )
        program = HERE / f"_nexmark_{engine}.py"
        return run_measured([self.pythons[engine], str(program), spec.to_argument()])

    def of(self, engine: str, query: str, kind: str, figure: str) -> list[float]:
        return [
            one[figure]
            for one in self.passes
            if (one["engine"], one["query"], one["kind"]) == (engine, query, kind)
        ]


def run_measured(command: list[str]) -> tuple[list[dict], float]:
    """Run an engine; give its last line, read as JSON, and the most memory it was seen to have."""
    most = 0.0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, text=True)
        while process.poll() is None:
            most = max(most, tree_memory_mib(process.pid))
            try:
                process.wait(_SAMPLED_S)
            except subprocess.TimeoutExpired:
                continue
        out.seek(0)
        errors.seek(0)
        text = out.read()
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{text[-2000:]}{errors.read()[-4000:]}")
    return json.loads(text.strip().splitlines()[-1]), most


def flink_python(options: argparse.Namespace) -> str:
    """Give the Python of an environment with Flink; make one where none was named."""
    if options.flink_python:
        return options.flink_python
    folder = options.cache / "flink-environment"
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"making an environment with {FLINK} in {folder}: 850 MB", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", FLINK], check=True)
        (folder / "made").touch()
    return str(python)


def report(bench: Bench) -> None:
    """Print the tables: CPU, marginal CPU, wall, cold runs, memory."""
    engines, events = list(bench.pythons), bench.made.events
    peers = [engine for engine in engines if engine != "millstream"]
    for title, figure, digits in (
        ("CPU seconds, warm", "cpu_s", 2),
        ("CPU seconds beyond q0, warm", "marginal_s", 2),
        ("seconds, warm", "wall_s", 2),
    ):
        rows = []
        for query in bench.options.queries:
            values = {engine: bench.of(engine, query, "warm", figure) for engine in engines}
            cells = [spread(v, digits) if v else "-" for v in values.values()]
            ratios = [_ratio(values[peer], values["millstream"]) for peer in peers]
            rows.append([query, *cells, *ratios])
        header = ["query", *engines, *(f"{peer} / ours" for peer in peers)]
        table(f"{events:,} events ({bench.made.bids:,} bids): {title}", header, rows)
    rows = []
    for engine in engines:
        cold = bench.of(engine, "q0", "cold", "cpu_s")
        warm = statistics.median(bench.of(engine, "q0", "warm", "cpu_s"))
        start = [one - warm for one in cold]
        rows.append([engine, spread(cold), spread(start), spread(bench.memory_mib[engine], 0)])
    table(
        "start, and memory",
        ["engine", "q0 cold, CPU-s", "of it the start", "most memory, MiB"],
        rows,
    )
    about = bench.made.about
    print(f"  the log was filled in {about['fill_s']} s with {about['fill_cpu_s']} CPU-s")


def _ratio(theirs: list[float], ours: list[float]) -> str:
    if not theirs or not ours or min(ours) <= 0:
        return "-"
    return spread([a / b for a, b in zip(theirs, ours, strict=False)], 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = list(COLUMNS)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--queries", type=_names, default=names)
    parser.add_argument("--peers", type=_names, default=["flink", "spark"])
    parser.add_argument("--views", type=_names, default=[])
    parser.add_argument("--input", choices=list(LOGS), default="json")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "nexmark-cache")
    parser.add_argument("--flink-python")
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    pythons = {"millstream": sys.executable}
    if "flink" in options.peers:
        pythons["flink"] = flink_python(options)
    if "spark" in options.peers:
        pythons["spark"] = sys.executable
    made = prepared(options.cache.absolute(), options.events, options.batches, options.input)
    print(f"input: {made.folder}: {made.about}", flush=True)
    bench = Bench(options, made, pythons)
    bench.measure()
    report(bench)
    if bench.wrong:
        sys.exit("there are wrong answers, which were not timed: see above")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    main()
