"""A copy of captured tables, to which the units of a source are applied: whole, with their progress, or not at all."""

import json

from row_blocks import one_by_one

from millstream.capture.units import TableChange


class Replica:
    """What a log would hold: units, and the tables that they make; stored whole or not at all."""

    def __init__(self):
        self.progress = None
        self.tables = {}
        self.units = []

    def store(self, unit):
        contents = one_by_one(unit.contents)
        for content in contents:
            if isinstance(content, TableChange):
                self._apply(content)
        self.progress = json.loads(json.dumps(unit.progress))
        if unit.kind != "progress":
            self.units.append((unit.kind, unit.position, contents))

    def _apply(self, change):
        rows = self.tables.setdefault(change.table, {})
        if change.op == "t":
            rows.clear()
        if change.before is not None and change.op in "ud":
            rows.pop(tuple(change.before[name] for name in change.key), None)
        if change.after is not None:
            rows[tuple(change.after[name] for name in change.key)] = change.after

    def rows(self, table):
        return list(self.tables.get(table, {}).values())

    def changes(self, table=None):
        return [
            content
            for _, _, contents in self.units
            for content in contents
            if isinstance(content, TableChange) and table in (None, content.table)
        ]

    def follow(self, source, done, *, limit=100_000):
        """Store units until ``done()``, which is asked where the source has nothing more."""
        units = source.units(self.progress)
        for _, unit in zip(range(limit), units, strict=False):
            self.store(unit)
            if unit.kind == "progress" and done():
                break
        units.close()


def replayed(values, key):
    """Return the rows that a table has after all values of its topic, by their keys."""
    rows = {}
    for value in values:
        if value["op"] == "t":
            rows.clear()
            continue
        if value["before"] is not None:
            rows.pop(tuple(value["before"][name] for name in key), None)
        if value["after"] is not None:
            rows[tuple(value["after"][name] for name in key)] = value["after"]
    return rows
