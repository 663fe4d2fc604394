"""Contents of units as single changes: what a block of rows says, read from its definition."""

import json

from millstream.capture.units import RowBlock, TableChange


def one_by_one(contents):
    """Return contents with a change for each row of a block."""
    return [change for content in contents for change in _changes(content)]


def _changes(content):
    if not isinstance(content, RowBlock):
        return [content]
    rows = [json.loads(row) for row in content.rows.to_pylist()]
    keys = [None] * len(rows) if content.keys is None else content.keys.to_pylist()
    assert len(keys) == len(rows)
    assert {name for row in rows for name in row} <= content.columns
    key = () if content.keys is None else tuple(json.loads(keys[0]))
    old = [None] * len(rows) if content.before is None else content.before.to_pylist()
    changes = []
    for row, at, was in zip(rows, keys, old, strict=True):
        assert at is None or json.loads(at) == {name: row[name] for name in key}
        before, after = (row, None) if content.op == "d" else (was and json.loads(was), row)
        assert (
            before is None or after is None or [before[n] for n in key] == [after[n] for n in key]
        )
        changes.append(TableChange(content.database, content.table, content.op, key, before, after))
    return changes
