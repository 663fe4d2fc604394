"""A database, a connector that writes down its changes as Debezium does, and what a table of them must have.

Nothing here knows of batches, versions or waiting. The database has two tables, and each transaction changes
them at once; the connector writes records to the topics of the tables, and BEGIN and END to that of
transactions. The model applies all records of a transaction, one after the other, by the rules of the envelope.
"""

import json
import random
from dataclasses import dataclass, field

from millstream.testing import Row

USERS, ORDERS, TRANSACTIONS = "shop.public.users", "shop.public.orders", "shop.transaction"
TOPICS = (USERS, ORDERS)
SCHEMA = {"id": int, "name": str | None, "big": str | None}
UNAVAILABLE = "__debezium_unavailable_value"
COLUMNS = tuple(SCHEMA)


@dataclass
class Change:
    """One record of a table. ``big`` is None where the connector does not know the value."""

    topic: str
    op: str  # Debezium's
    key: int | None = None
    name: str = ""
    big: str | None = None
    before: int | None = None  # another key, which an update had before
    carry_from: int | None = None
    tombstone: bool = False
    transaction: str | None = None
    total: int | None = None

    def row(self):
        """Return the record as input of a test."""
        if self.tombstone:
            return Row(None, key=json.dumps({"id": self.key}))
        value = {"before": None, "after": None, "op": self.op}
        value["source"] = {"ts_us": 1_767_225_600_000_123, "snapshot": str(self.op == "r").lower()}
        if self.op == "d":
            value["before"] = {"id": self.key, "name": None, "big": None}
        elif self.op in "cur":
            big = UNAVAILABLE if self.big is None else self.big
            value["after"] = {"id": self.key, "name": self.name, "big": big}
        if self.before is not None:
            value["before"] = {"id": self.before, "name": "?", "big": "?"}
        if self.carry_from is not None:
            value["carry_from"] = {"id": self.carry_from}
        value["transaction"] = self.transaction and {
            "id": self.transaction,
            "total_order": self.total,
            "data_collection_order": self.total,
        }
        if self.key is None:
            return Row(value, partition=0)
        return Row(value, key=json.dumps({"id": self.key}))


@dataclass
class Tables:
    """The rows of both tables by the rules, and the records that have no row to take a value from."""

    rows: dict = field(default_factory=lambda: {topic: {} for topic in TOPICS})
    dead: int = 0
    ordered: bool = True  # records of several keys have an order
    gone: dict = field(default_factory=dict)  # the last row that was deleted, by table

    def apply(self, change):
        table = self.rows[change.topic]
        if not self.ordered and (change.op == "t" or change.before is not None):
            self.dead += 1
        elif change.op == "t":
            table.clear()
            self.gone.pop(change.topic, None)
        elif (
            change.op == "d"
        ):  # or its tombstone alone, where compaction left no more, or it is sent again
            if change.key in table:
                self.gone[change.topic] = change.key, table.pop(change.key)
        else:
            self._write(change, table)

    def _write(self, change, table):
        known = table.get(change.key)
        if change.before is not None:
            known = table.pop(change.before, None)
            if known is not None:  # a row that moves is deleted under the key that it had
                self.gone[change.topic] = change.before, known
        elif change.carry_from is not None and self.ordered:
            key, row = self.gone.get(change.topic, (None, None))
            known = table.get(change.carry_from, row if key == change.carry_from else None)
        if change.big is None and known is None:
            self.dead += 1
            return
        big = known["big"] if change.big is None else change.big
        table[change.key] = {"id": change.key, "name": change.name, "big": big}
        if self.gone.get(change.topic, (None,))[0] == change.key:
            self.gone.pop(change.topic)

    def copy(self):
        return {
            topic: sorted((tuple(row.values()) for row in rows.values()), key=repr)
            for topic, rows in self.rows.items()
        }


@dataclass
class Source:
    """A database and its connector, driven by a random number: all is the same for the same seed.

    ``states`` has the tables after the snapshot, and after each transaction.
    """

    seed: int
    transactions: bool = True
    moves: bool = True
    topics: dict = field(default_factory=lambda: {USERS: [], ORDERS: [], TRANSACTIONS: []})
    snapshot: dict = field(default_factory=dict)
    states: list = field(default_factory=list)
    model: Tables = field(default_factory=Tables)

    def __post_init__(self):
        self.dice = random.Random(self.seed)
        self.number = 0
        self.written = []  # of each transaction its records, BEGIN and END

    def begin(self, keys=4):
        """Write the snapshot."""
        for topic in TOPICS:
            for key in range(keys):
                if self.dice.random() < 0.6:
                    self._write(Change(topic, "r", key, f"r{key}", f"R{key}"))
        self.snapshot = {topic: list(rows) for topic, rows in self.topics.items()}
        self.topics = {topic: [] for topic in self.topics}
        self.states.append(self.model.copy())

    def _write(self, change):
        self.model.apply(change)
        self.topics[change.topic].append(change.row())

    def commit(self, changes_max=5):
        """Commit one transaction, or roll one back, of which nothing is written."""
        self.number += 1
        if self.dice.random() < 0.15:
            return
        name = f"{self.number + 700}:{self.number * 1000}"
        changes = []
        for _ in range(self.dice.randint(1, changes_max)):
            changes += self._change(self.dice.choice(TOPICS))
        total = 0
        for change in changes:
            if not change.tombstone:
                total += 1
                change.total, change.transaction = total, name if self.transactions else None
            self.model.apply(change)
        counts = {
            topic: sum(one.topic == topic and not one.tombstone for one in changes)
            for topic in TOPICS
        }
        # Debezium's END has another number behind the colon.
        end = boundary("END", f"{name}7", counts)
        self.written.append((boundary("BEGIN", name), changes, end))
        self._send(*self.written[-1])
        self.states.append(self.model.copy())

    def _send(self, begin, changes, end):
        for change in changes:
            self.topics[change.topic].append(change.row())
        self.topics[TRANSACTIONS] += [one for one in (begin, end) if one is not None]

    def restart(self):
        """Send the last transactions again, the first of them perhaps from its middle on."""
        again = self.written[-self.dice.randint(1, 3) :]
        for number, (begin, changes, end) in enumerate(again):
            middle = self.dice.randint(0, len(changes)) if not number else 0
            self._send(None if middle else begin, changes[middle:], end)

    def leave_open(self):
        """Write a part of a transaction, and no END; and the END of one whose records are still to come."""
        change = Change(USERS, "c", 77, "open", "open", transaction="999:1", total=1)
        self.topics[USERS].append(change.row())
        self.topics[TRANSACTIONS].append(boundary("BEGIN", "999:1"))

    def _change(self, topic):
        key, other = self.dice.sample(range(6), 2)
        table = self._known(topic)
        name, big = f"n{self.number}", f"B{self.number}"
        kind = self.dice.random()
        if kind < 0.05:
            return [Change(topic, "t")]
        if key not in table:
            return [Change(topic, "c", key, name, big)]
        if kind < 0.25:
            gone = [Change(topic, "d", key)]
            return [*gone, Change(topic, "d", key, tombstone=True)]
        if kind < 0.45 and self.moves and other not in table:
            unknown = self.dice.random() < 0.7
            big = None if unknown else big
            if self.dice.random() < 0.5:
                return [Change(topic, "u", other, name, big, before=key)]
            carry = key if self.dice.random() < 0.8 else None
            return [
                Change(topic, "d", key),
                Change(topic, "d", key, tombstone=True),
                Change(topic, "c", other, name, big, carry_from=carry),
            ]
        return [Change(topic, "u", key, name, None if self.dice.random() < 0.5 else big)]

    def _known(self, topic):
        """Return the keys that the database has, as far as the model has them."""
        return self.model.rows[topic]


def boundary(status, name, counts=None):
    """Return a BEGIN or END."""
    listed = counts and [
        {"data_collection": topic.removeprefix("shop."), "event_count": n}
        for topic, n in counts.items()
        if n
    ]
    total = counts and sum(counts.values())
    value = {"status": status, "id": name, "event_count": total, "data_collections": listed}
    return Row(value)


def states_by_batch(out, views):
    """Return, after each batch that changed something, the rows of views."""
    rows = {view: {} for view in views}
    batches = {}
    for view in views:
        for change in out.changes(view).to_dicts():
            batches.setdefault(change["_batch_id"], []).append((view, change))
    for batch in sorted(batches):
        for view, change in batches[batch]:
            if change["_op"] == "delete":
                rows[view].pop(change["id"], None)
            else:
                rows[view][change["id"]] = tuple(change[name] for name in COLUMNS)
        yield {view: sorted(found.values(), key=repr) for view, found in rows.items()}
