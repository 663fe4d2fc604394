"""A database that a seed makes, what capture writes of it, and the rows that it has after each transaction.

Nothing here knows of batches, positions or targets: the model changes dictionaries, row by row, and keeps a copy
after each transaction. What capture would give of each change goes to a log through capture's own writer.
"""

import copy
import random
from dataclasses import dataclass, field

from millstream.capture.envelope import CaptureTopics
from millstream.capture.units import CaptureUnit, TableChange, TableDefinition
from millstream.capture.writer import CaptureWriter

TABLES = ("users", "orders")
COLUMNS = (("id", "int8"), ("part", "text"), ("name", "text"), ("big", "text"))
KEY = ("id", "part")


def topic_of(table):
    return f"shop.public.{table}"


@dataclass
class ModelDatabase:
    """``states[n]`` are the tables after n transactions: of each, rows by key."""

    seed: int
    unavailable: bool = True
    tables: dict = field(default_factory=lambda: {table: {} for table in TABLES})
    states: list = field(default_factory=list)
    extra: bool = False
    number: int = 0

    def __post_init__(self):
        self.dice = random.Random(self.seed)
        self.states.append(copy.deepcopy(self.tables))

    def columns(self):
        more = [("extra", "int4")] if self.extra else []
        return tuple({"name": name, "type": kind} for name, kind in (*COLUMNS, *more))

    def definitions(self):
        return [TableDefinition("public", table, self.columns(), KEY) for table in TABLES]

    def unit(self, count=6):
        """Make one transaction of up to so many statements, and return it as capture gives it."""
        contents = []
        if not self.number:
            contents += self.definitions()
        elif not self.extra and self.dice.random() < 0.05:
            contents += self._alter()
        for _ in range(self.dice.randint(1, count)):
            contents += self._statement(self.dice.choice(TABLES))
        if not any(isinstance(one, TableChange) for one in contents):
            contents += self._insert(TABLES[0])
        self.number += 1
        self.states.append(copy.deepcopy(self.tables))
        return CaptureUnit(
            "transaction",
            f"p{self.number}",
            1000,
            iter(contents),
            {"at": self.number},
            {"db": "shop"},
        )

    def _alter(self):
        """Add a column: every row is read again with it, as capture does."""
        self.extra = True
        contents = self.definitions()
        for table, rows in self.tables.items():
            for row in rows.values():
                row["extra"] = 7
                contents.append(TableChange("public", table, "r", KEY, None, dict(row)))
        return contents

    def _statement(self, table):
        kind = self.dice.choices(
            ("insert", "update", "move", "delete", "truncate"), (5, 5, 2, 3, 0.3)
        )[0]
        return getattr(self, f"_{kind}")(table)

    def _some(self, table):
        rows = self.tables[table]
        return rows[self.dice.choice(sorted(rows))] if rows else None

    def _new_key(self):
        return self.dice.randrange(12), self.dice.choice(["a", "é'\t\\", ""])

    def _row(self, key):
        row = {
            "id": key[0],
            "part": key[1],
            "name": self.dice.choice([None, "n\n", "\\N", "{}"]),
            "big": f"big{self.dice.randrange(1000)}",
        }
        return {**row, "extra": self.dice.randrange(9)} if self.extra else row

    def _insert(self, table):
        key = self._new_key()
        if key in self.tables[table]:
            return self._update(table)
        row = self.tables[table][key] = self._row(key)
        return [TableChange("public", table, "c", KEY, None, dict(row))]

    def _given(self, row):
        """Return a row as an update has it: perhaps without the large value, which it left as it was."""
        given = dict(row)
        if self.unavailable and self.dice.random() < 0.5:
            del given["big"]
        return given

    def _update(self, table):
        row = self._some(table)
        if row is None:
            return self._insert(table)
        row["name"] = f"name{self.dice.randrange(1000)}"
        return [TableChange("public", table, "u", KEY, None, self._given(row))]

    def _move(self, table):
        row, key = self._some(table), self._new_key()
        if row is None or key in self.tables[table]:
            return self._update(table)
        before = {"id": row["id"], "part": row["part"]}
        del self.tables[table][row["id"], row["part"]]
        row["id"], row["part"] = key
        self.tables[table][key] = row
        return [TableChange("public", table, "u", KEY, before, self._given(row))]

    def _delete(self, table):
        row = self._some(table)
        if row is None:
            return []
        del self.tables[table][row["id"], row["part"]]
        return [
            TableChange("public", table, "d", KEY, {"id": row["id"], "part": row["part"]}, None)
        ]

    def _truncate(self, table):
        self.tables[table].clear()
        return [TableChange("public", table, "t", ())]


def write(log, units, *, partitions=1, cleanup="delete", group=3, connector="postgresql"):
    """Write units as capture does, several to a transaction of the log."""
    writer = CaptureWriter(log, CaptureTopics("shop"), connector, lambda: 5000, partitions, cleanup)
    with writer:
        units = list(units)
        for first in range(0, len(units), group):
            writer.write(units[first : first + group])
