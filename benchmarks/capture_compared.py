"""Millstream's capture and Debezium's engine on the same changes: which records differ, and by which rule.

    python benchmarks/capture_compared.py [--transactions 400] [--seed 1] [--debezium-python PATH]

Every value of every type and a random workload (aborted, partly rolled back and two-phase transactions, changes of keys,
large values that an update leaves as they were, truncations, tables without a key) are read by both from slots that
were made at the same place. The records of each table's topic are compared one after another: operation, key, columns,
transaction, number in it. Differences that docs/capture-debezium.md explains are counted by their rule; any other one
is printed, and the program then ends with 1.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tempfile
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import psycopg
from _capture_random import SCHEMA, each_value, transactions
from capture import NAME, Debezium, Millstream, debezium_python, execute

import millstream as ms
from millstream.client import connect
from millstream.testing.postgres import PostgresServer

UNAVAILABLE = "__debezium_unavailable_value"
KEYS = {"types": ("id",), "rows": ("x", "y"), "whole_rows": ()}


# ── values, by Debezium's documented types ──────────────────────────────────────────────────


def unscaled(text: str) -> int:
    return int.from_bytes(base64.b64decode(text), "big", signed=True)


def decimal_of(value, scale: int | None = None) -> str:
    if isinstance(value, dict):  # VariableScaleDecimal
        scale, value = value["scale"], value["value"]
    digits = Decimal(unscaled(value)).as_tuple()
    return f"{Decimal(digits._replace(exponent=-(scale or 0))):f}"


def day(value: int) -> str:
    return (date(1970, 1, 1) + timedelta(days=value)).isoformat()


def micros(value: int) -> datetime:
    return datetime(1970, 1, 1) + timedelta(microseconds=value)  # noqa: DTZ001 - of no zone


def instant(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def bits(value: str) -> str:
    return "".join(f"{byte:08b}" for byte in reversed(base64.b64decode(value)))


def same_bits(ours: str, theirs) -> bool:
    theirs = str(int(theirs)) if isinstance(theirs, bool) else bits(theirs)
    return ours.lstrip("0") == theirs.lstrip("0")


def out_of_range(text: str) -> bool:
    return "infinity" in text or text.endswith("BC") or not text[4] == "-"  # noqa: SIM201


def of_clock(text: str) -> int:
    hours, minutes, seconds = text.split(":")
    return int(Decimal(seconds) * 1_000_000) + 60_000_000 * (int(minutes) + 60 * int(hours))


def of_interval(text: str) -> int:
    """Return Debezium's microseconds of an ISO 8601 duration: months of 30.4375 days."""
    units = {
        "Y": 12 * 30.4375 * 86400,
        "M": 30.4375 * 86400,
        "D": 86400,
        "H": 3600,
        "m": 60,
        "S": 1,
    }
    total, in_time, number = Decimal(0), False, ""
    for letter in text[1:]:
        if letter == "T":
            in_time = True
        elif letter.isalpha():
            total += Decimal(number) * Decimal(units["m" if in_time and letter == "M" else letter])
            number = ""
        else:
            number += letter
    return int(total * 1_000_000)


def value_rule(column: str, ours, theirs) -> str | None:  # noqa: C901 - a table
    """Return the rule by which two values of one column differ, "" if they are equal; None if none explains it."""
    if ours == theirs and type(ours) is type(theirs):
        return ""
    text = ours if isinstance(ours, str) else ""
    if theirs is None and text in ("NaN", "Infinity", "-Infinity"):
        return "numeric NaN and infinities: null"
    if theirs is None and isinstance(ours, list) and "Infinity" in ours:
        return "an array of numerics with one that is infinite: null"
    if column in ("float4", "float8") and isinstance(theirs, (int, float)) and ours == theirs:
        return ""
    if column in ("float4", "float8") and str(theirs) == text:
        return ""
    if column in ("numeric", "decimal", "n", "money"):
        scale = {"decimal": 2, "n": 2, "money": 2}.get(column)
        plain = text.replace("$", "").replace(",", "")
        if theirs is not None and Decimal(decimal_of(theirs, scale)) == Decimal(plain):
            return "decimals: text, not bytes in base64"
        return None
    if column == "numeric_array" and isinstance(theirs, list):
        found = [None if one is None else Decimal(decimal_of(one)) for one in theirs]
        if found == [None if one is None else Decimal(one) for one in ours]:
            return "decimals: text, not bytes in base64"
    if column in ("bit", "varbit"):
        return "bits: 0 and 1, not bytes" if same_bits(text, theirs) else None
    if column == "date":
        if out_of_range(text):
            return "dates before 1 and after 9999, and infinity: text, not a number of days"
        return "times: ISO 8601, not numbers" if day(theirs) == text else None
    if column == "time":
        return "times: ISO 8601, not numbers" if of_clock(text) == theirs else None
    if column == "timetz":
        return "times with a zone: as they are, not in UTC"
    if column == "timestamp":
        if out_of_range(text):
            return "dates before 1 and after 9999, and infinity: text, not a number of days"
        return (
            "times: ISO 8601, not numbers"
            if micros(theirs) == datetime.fromisoformat(text)
            else None
        )
    if column == "timestamptz" and text:
        if out_of_range(text):
            return "dates before 1 and after 9999, and infinity: text, not a number of days"
        return "" if instant(text) == instant(theirs) else None
    if column == "interval":
        return "intervals: ISO 8601, not microseconds" if of_interval(text) == theirs else None
    if column == "point" and isinstance(theirs, dict):
        x, y = map(float, text.strip("()").split(","))
        return "points: text" if (x, y) == (theirs["x"], theirs["y"]) else None
    if column in ("pair", "pg_lsn", "tsvector", "money") and isinstance(theirs, str):
        plain = base64.b64decode(theirs).decode() == text
        return "types that Debezium does not know: text, not base64 of it" if plain else None
    if column == "jsonb" and isinstance(theirs, str) and json.loads(theirs) == json.loads(text):
        return "numbers of jsonb: as PostgreSQL writes them"
    if column == "text_array" and isinstance(theirs, str):
        return "arrays of arrays: nested"
    return None


# ── records ─────────────────────────────────────────────────────────────────────────────────


class Comparison:
    """Compares the records of one table, and counts by which rules they differ."""

    def __init__(self, table: str) -> None:
        self.table, self.rules, self.unexplained = table, Counter(), []

    def note(self, rule: str | None, *what) -> None:
        if rule is None:
            self.unexplained.append((self.table, *what))
        elif rule:
            self.rules[rule] += 1

    def rows(self, ours: dict, theirs: dict, side: str, seq: int) -> None:
        row, other = ours[side], theirs[side]
        if row is None or other is None:
            self.note("" if row is other else None, seq, side, row, other)
            return
        for name in other:
            if name not in row:
                if other[name] == UNAVAILABLE and name in ours.get("unavailable", ()):
                    self.note("values that were not sent: left out and named, not a placeholder")
                elif side == "before" and other[name] is None:
                    self.note("before has the key alone, without nulls for other columns")
                else:
                    self.note(None, seq, side, name, "absent", other[name])
                continue
            self.note(
                value_rule(name, row[name], other[name]), seq, side, name, row[name], other[name]
            )
        more = sorted(row.keys() - other.keys())
        self.note(None if more else "", seq, "columns", more)

    def records(self, ours: list, theirs: list) -> None:
        if len(ours) != len(theirs):
            self.note(None, "count", len(ours), len(theirs))
        for seq, ((key, value), (their_key, their_value)) in enumerate(
            zip(ours, theirs, strict=False)
        ):
            self.note("" if key == their_key else None, seq, "key", key, their_key)
            if value is None or their_value is None:
                self.note(
                    "" if value is their_value else None, seq, "tombstone", value, their_value
                )
                continue
            for name in ("op",):
                self.note(
                    "" if value[name] == their_value[name] else None, seq, name, value, their_value
                )
            for name in ("txId", "db", "schema", "table", "connector", "name", "snapshot"):
                one, other = (found["source"][name] for found in (value, their_value))
                self.note("" if one == other else None, seq, name, one, other)
            for name in ("total_order", "data_collection_order"):
                one, other = (found["transaction"][name] for found in (value, their_value))
                self.note("" if one == other else None, seq, name, one, other)
            self.rows(value, their_value, "before", seq)
            self.rows(value, their_value, "after", seq)


def our_records(folder: Path) -> dict[str, list]:
    with connect(folder) as log:
        found = {}
        for table in KEYS:
            read = log.read(f"{NAME}.public.{table}", 0, columns=("key", "value"))
            pairs = zip(read["key"].to_pylist(), read["value"].to_pylist(), strict=True)
            parsed = [
                tuple(None if one is None else json.loads(one) for one in pair) for pair in pairs
            ]
            # A table without a key is read again whole: it begins with a truncation.
            found[table] = [
                one for one in parsed if one[1] is None or one[1]["source"]["snapshot"] == "false"
            ]
    return found


def their_records(path: Path) -> dict[str, list]:
    found: dict[str, list] = {table: [] for table in KEYS}
    for line in path.read_text().splitlines():
        topic, *pair = json.loads(line)
        table = topic.rpartition(".")[2]
        if table in found and topic.count(".") == 2:
            found[table].append(tuple(None if one is None else json.loads(one) for one in pair))
    return found


def without_keyless_tombstones(records: list) -> tuple[list, int]:
    kept = [one for one in records if one != (None, None)]
    return kept, len(records) - len(kept)


def run(options: argparse.Namespace, folder: Path) -> tuple[dict, dict]:
    """Let both read the same workload; return their records by table."""
    settings = {"wal_level": "logical", "max_prepared_transactions": "10"}
    with PostgresServer(**settings) as server:
        ours, theirs = (kind(server, "compared", folder) for kind in (Millstream, Debezium))
        execute(ours, *SCHEMA)
        ours.prepare()
        theirs.prepare()
        for statement in each_value():
            execute(ours, statement)
        for statements in transactions(options.seed, options.transactions):
            with psycopg.connect(server.url("compared"), autocommit=True) as session:
                session.execute("BEGIN")
                for statement in statements:
                    session.execute(statement)
        url = server.url("compared")
        status = ms.capture(url, to=folder / "log", name=NAME).run(until="caught-up")
        print(f"{status.changes:,} changes")
        theirs.finish(theirs.start(status.changes))
    return our_records(folder / "log"), their_records(folder / "records")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transactions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--debezium-python")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "capture-bench")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    Debezium.python = debezium_python(options)
    with tempfile.TemporaryDirectory(dir=options.cache) as name:
        ours, theirs = run(options, Path(name))
    rules, unexplained = Counter(), []
    for table in KEYS:
        compared = Comparison(table)
        plain, dropped = without_keyless_tombstones(theirs[table])
        compared.rules["tombstones without a key: none"] += dropped
        compared.records(ours[table], plain)
        print(f"{table}: {len(ours[table]):,} records, {len(plain):,} of Debezium")
        rules += compared.rules
        unexplained += compared.unexplained
    for rule, count in sorted(rules.items()):
        print(f"{count:8,}  {rule}")
    for one in unexplained[:40]:
        print("unexplained:", *(repr(part)[:160] for part in one))
    print(f"{len(unexplained)} unexplained")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
