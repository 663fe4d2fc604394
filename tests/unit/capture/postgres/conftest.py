"""A PostgreSQL server for the tests of this folder, and a copy of its tables that units are applied to."""

import json
import time

import pytest
from capture_postgres_servers import Shop, start
from row_blocks import one_by_one

from millstream.capture.units import TableChange, TableDefinition
from millstream.errors import RetriableError


@pytest.fixture(
    scope="session", params=["system", pytest.param("wheel", marks=pytest.mark.thorough)]
)
def logical_server(request):
    with start(of_wheel=request.param == "wheel") as server:
        yield server


@pytest.fixture
def shop(logical_server):
    made = Shop(logical_server)
    yield made
    made.run(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
        f"WHERE database = '{made.name}' AND active_pid IS NOT NULL"
    )
    for (slot,) in made.run(
        f"SELECT slot_name FROM pg_replication_slots WHERE database = '{made.name}' AND NOT temporary"
    ):
        made.run(
            f"SELECT count(*) FROM pg_drop_replication_slot('{slot}')"
            if _is_free(made, slot)
            else "SELECT 1"
        )


def _is_free(shop, slot):
    while shop.run(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'") == [
        (True,)
    ]:
        pass
    return True


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
            else:
                names = {column["name"] for column in content.columns}
                for row in self.tables.get(content.table, {}).values():
                    for name in row.keys() - names:
                        del row[name]
        self.progress = json.loads(json.dumps(unit.progress))
        if contents:
            self.units.append((unit.kind, unit.position, contents))

    def _apply(self, change):
        rows = self.tables.setdefault(change.table, {})
        if change.op == "t":
            rows.clear()
            return
        old = None
        if change.before is not None and change.op in "ud":
            old = rows.pop(self._key(change, change.before), None)
        if change.after is not None:
            key = self._key(change, change.after)
            base = old if old is not None else rows.get(key, {})
            rows[key] = {**base, **change.after} if change.op == "u" else change.after

    def _key(self, change, row):
        return tuple(row[name] for name in change.key or sorted(row))

    def changes(self, table=None):
        return [
            content
            for _, _, contents in self.units
            for content in contents
            if isinstance(content, TableChange) and table in (None, content.table)
        ]

    def definitions(self):
        return [
            content
            for _, _, contents in self.units
            for content in contents
            if isinstance(content, TableDefinition)
        ]

    def follow(self, source, *, limit=None, done=lambda: True):
        """Store units until the source has nothing more and ``done()``, or as many as ``limit``.

        The server learns a moment later that the connection before is closed: until then it is tried again, as a capture does.
        """
        until = time.monotonic() + 60
        while True:
            try:
                self._follow(source, limit, done)
            except RetriableError as error:
                if "is used by the server's process" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.05)
            else:
                return

    def _follow(self, source, limit, done):
        units = source.units(self.progress)
        for number, unit in enumerate(units):
            if number == limit:
                break  # it is given, and not stored: as a crash leaves it
            self.store(unit)
            source.acknowledge(self.progress)
            if unit.kind == "progress" and done():
                break
        units.close()
        source.close()


@pytest.fixture
def replica():
    return Replica()
