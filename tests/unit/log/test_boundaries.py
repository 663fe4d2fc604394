"""Where records begin and end: every way of finding them against following lengths naively."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import CorruptBatchError
from millstream.log import boundaries
from millstream.log.batch import HEADER_BYTES, RECORD_BYTES_MIN
from millstream.log.boundaries import BatchBodies, find_records
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.varint import encode_varint, read_varint

NEVER = 1e18
WAYS = {
    "record by record": {"_PARALLEL_STEP": NEVER, "_GUESS_RECORDS_MIN": NEVER},
    "in parallel": {"_PARALLEL_STEP": -NEVER, "_GUESS_RECORDS_MIN": NEVER},
    "by guessing": {"_GUESS_RECORDS_MIN": 0, "_GUESS_BATCH": -NEVER, "_PARALLEL_STEP": NEVER},
}
few_zeros = st.binary(max_size=90)
many_zeros = st.lists(st.sampled_from([0, 0, 0, 1, 14, 16, 128, 130]), max_size=90).map(bytes)
values = st.none() | few_zeros | many_zeros | st.just(b"x" * 70)
headers = st.just(()) | st.just((("h", b"\0\0"),))
rows = st.lists(st.builds(SimpleRecord, st.integers(0, 300), values, values, headers), min_size=1)


def bodies_of(bodies: list[bytes], counts: list[int]) -> BatchBodies:
    """Return these bodies with other bytes around them."""
    data, starts = b"", []
    for body in bodies:
        data += bytes(HEADER_BYTES)
        starts.append(len(data))
        data += body
    data += bytes(5)
    stops = [start + len(body) for start, body in zip(starts, bodies, strict=True)]
    arrays = (np.array(numbers, np.int64) for numbers in (starts, stops, counts))
    return BatchBodies(data, np.frombuffer(data, np.uint8), *arrays)


def naive(bodies: BatchBodies) -> tuple[list[int], list[int]] | None:
    begins, ends = [], []
    for start, stop, count in zip(*(x.tolist() for x in bodies[2:]), strict=True):
        at = start
        for _ in range(count):
            try:
                length, begin = read_varint(bodies.data, at, stop)
            except ValueError:
                return None
            if begin - at > 5 or not RECORD_BYTES_MIN - 1 <= length <= stop - begin:
                return None
            at = begin + length
            begins.append(begin)
            ends.append(at)
        if at != stop:
            return None
    return begins, ends


def found_by(way: str, bodies: BatchBodies) -> tuple[list[int], list[int]] | None:
    def misfit(what: str, batch: int) -> CorruptBatchError:
        assert 0 <= batch < len(bodies.counts)
        return CorruptBatchError(what, path="", position=batch)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in WAYS[way].items():
            patch.setattr(boundaries, name, value)
        try:
            begins, ends = find_records(bodies, misfit)
        except CorruptBatchError:
            return None
    return begins.tolist(), ends.tolist()


@pytest.mark.parametrize("way", WAYS)
@given(groups=st.lists(rows, min_size=1, max_size=4))
def test_every_way_finds_what_following_the_lengths_gives(
    way: str, groups: list[list[SimpleRecord]]
) -> None:
    encoded = [encode_records(group) for group in groups]
    bodies = bodies_of([batch.tail[44:] for batch in encoded], [batch.count for batch in encoded])
    wanted = naive(bodies)
    assert wanted is not None
    assert found_by(way, bodies) == wanted


@pytest.mark.parametrize("way", WAYS)
@given(groups=st.lists(rows, min_size=1, max_size=3), data=st.data())
def test_every_way_refuses_what_following_the_lengths_refuses(
    way: str, groups: list[list[SimpleRecord]], data: st.DataObject
) -> None:
    encoded = [encode_records(group) for group in groups]
    contents = [bytearray(batch.tail[44:]) for batch in encoded]
    for _ in range(data.draw(st.integers(1, 3))):
        content = data.draw(st.sampled_from(contents))
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    counts = [batch.count for batch in encoded]
    number = data.draw(st.integers(0, len(counts) - 1))
    most = len(contents[number]) // RECORD_BYTES_MIN
    counts[number] = data.draw(st.just(counts[number]) | st.integers(1, most))
    bodies = bodies_of([bytes(content) for content in contents], counts)
    assert found_by(way, bodies) == naive(bodies)


def body_of(*rows: SimpleRecord) -> bytes:
    return encode_records(rows).tail[44:]


def record(value: bytes) -> bytes:
    """Return a record without a zero anywhere but where there must be one."""
    content = b"\0\2\2\1" + encode_varint(len(value)) + value + b"\0"
    return encode_varint(len(content)) + content


# A value of the first batch with what could be a record that leads over the header of the next.
FALSE_LEAD = b"\0" + encode_varint(HEADER_BYTES + 21) + b"\0" + b"v" * 19
HOSTILE = {
    "a batch ends in a false record and the next has too few": (
        [record(FALSE_LEAD), record(b"v" * 70)],
        [1, 2],
    ),
    "a record too short to be one": ([record(b"v" * 9) + b"\x06\0\1\1"] * 2, [2, 2]),
    "a length that is one too large": ([b"\x1c" + record(b"v" * 7)[1:] + record(b"v" * 9)], [2]),
    "a length of six bytes": (
        [b"\x8e\x80\x80\x80\x80\x00" + bytes(7), body_of(SimpleRecord(0, b"k", b"v"))],
        [1, 1],
    ),
    "no length at all": ([b"\x8e" * 400] * 2, [50, 50]),
    "one record more than there are": ([body_of(SimpleRecord(0, b"k", b"v" * 30))] * 2, [2, 1]),
    "one record less than there are": ([body_of(*[SimpleRecord(0, b"k", b"v")] * 3)] * 2, [3, 2]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("contents", "counts"), HOSTILE.values(), ids=HOSTILE.keys())
def test_every_way_refuses_what_was_made_to_mislead_it(
    way: str, contents: list[bytes], counts: list[int]
) -> None:
    bodies = bodies_of(contents, counts)
    assert naive(bodies) is None
    assert found_by(way, bodies) is None


def test_random_sizes_without_headers_are_found_by_guessing() -> None:
    sizes = np.random.default_rng(5).integers(0, 250, 3000).tolist()
    batch = encode_records([SimpleRecord(0, None, b"v" * size) for size in sizes])
    bodies = bodies_of([batch.tail[44:]] * 2, [batch.count] * 2)
    found = boundaries._guess(bodies)
    assert found is not None
    assert [part.tolist() for part in found] == list(naive(bodies) or ())


@pytest.mark.parametrize("filler", [b"\0", b"\x0e\0\0\0\0\0\0\0", b"\0\x0e\0"])
def test_values_that_look_like_records_cost_time_and_nothing_else(filler: bytes) -> None:
    batch = encode_records([SimpleRecord(0, b"k", filler * (n % 40)) for n in range(2000)])
    bodies = bodies_of([batch.tail[44:]], [batch.count])
    assert found_by("by guessing", bodies) == naive(bodies)
