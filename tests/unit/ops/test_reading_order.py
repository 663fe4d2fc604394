"""In which order a job has read its records, compared with reading them one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.ops.reading_order import ReadAt, reading_order

TOPICS = st.sampled_from([{"a": 1}, {"a": 4}, {"a": 7}, {"a": 2, "b": 1}, {"b": 1, "a": 2}])


@st.composite
def read_logs(draw):
    """Draw where each partition begins, and what each batch reads of each."""
    places = [(topic, n) for topic, count in draw(TOPICS).items() for n in range(count)]
    starts = {place: draw(st.integers(0, 2)) for place in places}
    batches = draw(st.lists(st.fixed_dictionaries(dict.fromkeys(places, st.integers(0, 2))), max_size=5))  # fmt: skip
    return starts, batches


def by_topic(positions):
    topics = {topic: {} for topic, _ in positions}
    for (topic, number), offset in positions.items():
        topics[topic][number] = offset
    return {topic: [found[n] for n in range(len(found))] for topic, found in topics.items()}


def read_one_by_one(starts, batches):
    """Return the history of a job, and of each record its batch and what had been read before it."""
    at, history, found = dict(starts), [], {}
    for batch_id, counts in enumerate(batches):
        ends = {}
        for topic, number in sorted(counts):
            for _ in range(counts[topic, number]):
                found[topic, number, at[topic, number]] = ReadAt(batch_id, by_topic(at))
                at[topic, number] += 1
                ends.setdefault(topic, {})[str(number)] = at[topic, number]
        history.append({"batch_id": batch_id, "ends": ends})
    return history, found


@given(read_logs(), st.data())
def test_each_record_was_read_behind_those_that_were_read_before_it(log, data):
    starts, batches = log
    history, read = read_one_by_one(starts, batches)
    unread = [(topic, number, at + 99) for (topic, number), at in starts.items()]
    wanted = data.draw(st.sets(st.sampled_from([*read, *unread])))
    found = reading_order(history, by_topic(starts), wanted)
    assert found == {record: read[record] for record in wanted if record in read}


@given(read_logs(), st.integers(1, 4))
def test_of_a_history_without_its_beginning_no_batch_is_said_that_may_be_another(log, gone):
    starts, batches = log
    history, read = read_one_by_one(starts, batches)
    left = history[gone:]
    found = reading_order(left, by_topic(starts), read)
    for record, at in found.items():
        assert at == ReadAt(read[record].batch_id, None)
    firsts = {}  # the first batch that is left of each partition
    for batch in left:
        for topic, ends in batch["ends"].items():
            for number in ends:
                firsts.setdefault((topic, int(number)), batch["batch_id"])
    known = {r for r, at in read.items() if at.batch_id > firsts.get(r[:2], len(batches))}
    assert found.keys() == known
