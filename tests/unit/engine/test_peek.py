"""Peek against a naive model: the steps in Python over the last records of each partition."""

import hashlib

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import ConfigError

ROW = st.fixed_dictionaries({"ad": st.sampled_from("abc"), "n": st.integers(0, 9)})


def log_of(folder, rows, partitions=1):
    with ms.connect(folder) as log:
        log.create_topic("clicks", partitions=partitions)
        with log.producer() as producer:
            for place, row in enumerate(rows):
                producer.send("clicks", row, partition=place % partitions)


def stream_of(folder):
    app = ms.App("ads", log=folder)
    return app.topic("clicks", {"ad": str, "n": int}).stream()


def content(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@settings(deadline=None, max_examples=25)
@given(st.lists(ROW, max_size=40), st.integers(1, 12), st.integers(1, 50), st.booleans())
def test_the_rows_of_one_partition_are_those_of_its_records(
    tmp_path_factory, rows, wanted, records, last
):
    folder = tmp_path_factory.mktemp("peek")
    log_of(folder, rows)
    few = stream_of(folder).filter(pl.col("n") > 3).with_columns(double=pl.col("n") * 2)
    found = few.peek(wanted, end="last" if last else "first", records=records)
    read = rows[-records:] if last else rows
    kept = [{**row, "double": row["n"] * 2} for row in read if row["n"] > 3]
    assert found.to_dicts() == (kept[-wanted:] if last else kept[:wanted])
    assert found.columns == ["ad", "n", "double"]


@pytest.mark.parametrize("partitions", [1, 4, 7])
def test_a_table_adds_up_what_was_read_of_all_partitions(tmp_path, partitions):
    rows = [{"ad": "abc"[number % 3], "n": number} for number in range(5000)]
    log_of(tmp_path, rows, partitions)
    sums = stream_of(tmp_path).group_by("ad").agg(n=ms.sum("n"))
    changes = sums.peek(10_000, records=5000 * partitions)
    added = changes.group_by("ad").agg((pl.col("n") * pl.col("_diff")).sum()).sort("ad")
    expected = pl.DataFrame(rows).group_by("ad").agg(pl.col("n").sum()).sort("ad")
    assert added.to_dicts() == expected.to_dicts()


def test_nothing_is_written_also_beside_an_app_that_has_run(tmp_path):
    log_of(tmp_path, [{"ad": "a", "n": 1}] * 10)
    stream = stream_of(tmp_path)
    stream.dedup("ad", within="1 hour").view("latest", key="ad")
    stream.app.run(until="caught-up", engine="local")
    before = content(tmp_path)
    assert stream.dedup("ad", within="1 hour").peek().height == 1
    assert stream.peek(3).height == 3
    assert content(tmp_path) == before


def test_a_topic_that_is_not_there_yet_has_no_rows_and_is_not_created(tmp_path):
    stream = stream_of(tmp_path)
    assert stream.peek().schema == {"ad": pl.String, "n": pl.Int64}
    assert stream.peek().is_empty()
    with ms.connect(tmp_path) as log:
        assert "clicks" not in log.topics()


def test_rows_that_fail_are_counted_in_a_warning(tmp_path):
    log_of(tmp_path, [{"ad": "a", "n": 1}, {"ad": "1", "n": 1}])
    numbers = stream_of(tmp_path).select(number=pl.col("ad").cast(pl.Int64))
    with pytest.warns(UserWarning, match="1 of the rows became dead letters; the first at 'select"):
        assert numbers.peek().to_dicts() == [{"number": 1}]


def test_a_look_that_takes_too_long_ends_and_says_so(tmp_path):
    log_of(tmp_path, [{"ad": "a", "n": number} for number in range(5000)])
    with pytest.warns(UserWarning, match="not all"):
        found = stream_of(tmp_path).peek(1, timeout="1 microsecond")
    assert found["n"].to_list() == [1999]  # the end of the first batch


def test_what_cannot_be_is_refused(tmp_path):
    stream = stream_of(tmp_path)
    with pytest.raises(ConfigError, match="peek's rows is 0"):
        stream.peek(0)
    with pytest.raises(ConfigError, match="peek's end"):
        stream.peek(end="newest")
