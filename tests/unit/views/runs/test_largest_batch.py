"""The batch by whose speed the time of a rebuild is estimated: the one that read most, of equal ones the newer."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from millstream.views.runs.progress import Progress, largest_batch

AT = datetime(2026, 1, 1, tzinfo=UTC)


@given(st.lists(st.integers(0, 5), min_size=1))
def test_of_any_batches_the_last_of_the_largest_is_known(reads):
    known = None
    for number, read in enumerate(reads):
        progress = Progress(
            "a", number, AT, number + 0.5, read, 0, 0, 0, 0, 0, 0, None, {}, None, 0
        )
        known = largest_batch(known, progress)
    number = max(range(len(reads)), key=lambda one: (reads[one], one))
    assert known == {"batch_id": number, "read": reads[number], "duration_ms": number + 0.5}
