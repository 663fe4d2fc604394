"""Tables whose names PostgreSQL would cut are kept apart."""

import psycopg
from applied_model import write

import millstream as ms
from millstream.capture.units import CaptureUnit, TableChange, TableDefinition
from millstream.client import connect
from millstream.testing.postgres import PostgresServer

# 55 and 57 bytes, equal up to the last one or two letters: with 14 bytes before them they are one name.
ONE, OTHER = "измеренияпотокаводы_подробно", "измеренияпотокаводы_подробный"


def unit(number, *contents):
    return CaptureUnit(
        "transaction", f"p{number}", 1000, iter(contents), {"at": number}, {"db": "shop"}
    )


def defined(table, kind):
    columns = ({"name": "id", "type": "int8"}, {"name": "x", "type": kind})
    return TableDefinition("public", table, columns, ("id",))


def created(table, key):
    return TableChange("public", table, "c", ("id",), None, {"id": key, "x": 0.1234567890123})


def test_values_do_not_go_through_the_columns_of_another_table(tmp_path):
    with PostgresServer() as server, connect(tmp_path / "log") as log:
        url = server.url("copy")
        both = [
            defined(ONE, "float8"),
            defined(OTHER, "float4"),
            created(ONE, 1),
            created(OTHER, 1),
        ]
        write(log, [unit(1, *both), unit(2, created(ONE, 2))])
        applying = ms.apply("shop", url, log=tmp_path / "log")
        applying.batch_changes = 1
        applying.run(until="caught-up")
        with psycopg.connect(url) as session:
            rows = session.execute(f'SELECT id, x FROM "{ONE}" ORDER BY id').fetchall()
    assert rows == [(1, 0.1234567890123), (2, 0.1234567890123)]
