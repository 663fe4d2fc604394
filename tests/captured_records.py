"""What a capture writes of a unit: its records, whether they come one by one or many at once."""

from millstream.capture.envelope import CapturedRecords, CaptureTopics, UnitRecords
from millstream.capture.units import CaptureUnit


def records_of(contents, database, position, at):
    """Return the keys and values of the records of a transaction; ``at`` is when it was, as its unit has it."""
    maker = UnitRecords(CaptureTopics("shop"), database, lambda: 1_767_225_600_123)
    found = []
    for record in maker.records(CaptureUnit("transaction", position, at, iter(contents), {})):
        if isinstance(record, CapturedRecords):
            found += zip(record.keys.to_pylist(), record.values.to_pylist(), strict=True)
        else:
            found.append((record.key, record.value))
    return found
