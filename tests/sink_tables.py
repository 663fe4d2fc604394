"""What the tests of sinks to tables share: a topic, its records, and a model of what becomes of them."""

import json

import millstream as ms


def send(log_folder, *pairs, topic="t"):
    """Send records; a row is an object, the bytes of one, or None for a tombstone."""
    with ms.connect(log_folder) as log:
        log.create_topic(topic, exist_ok=True)
        with log.producer() as producer:
            for key, row in pairs:
                raw = isinstance(row, bytes) or row is None
                producer.send(topic, row if raw else json.dumps(row).encode(), key=key)


def reasons(log_folder, name="out"):
    """Return why records became dead letters, by offset."""
    with ms.connect(log_folder) as log:
        rows = log.read(f"{name}.dead", 0, columns=("headers",))["headers"].to_pylist()
    found = ({one["key"]: one["value"].decode() for one in row} for row in rows)
    return {int(one["offset"]): one["reason"] for one in found}


def modelled(changes, is_refused):
    """Return the rows by key after changes, one after the other, and the numbers of those that are refused.

    ``is_refused`` takes the rows that are there, a key and a row.
    """
    rows, refused = {}, []
    for number, (key, row) in enumerate(changes):
        if row is None:
            rows.pop(key, None)
        elif is_refused(rows, key, row):
            refused.append(number)
        else:
            rows[key] = row
    return rows, refused
