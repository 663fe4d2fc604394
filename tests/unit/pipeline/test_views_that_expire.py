"""Views whose rows expire: the rule, applied to all records at once, against any batches, partitions and crashes."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import ConfigError
from millstream.views.commit.committer import BatchCommitter

START = datetime(2026, 1, 1, tzinfo=UTC)
TTL = 10
WINDOW = 5


def declare(folder, partitions):
    app = ms.App("short", log=folder)
    fields = {"at": datetime, "k": str, "v": int}
    readings = app.topic("readings", fields, partitions=partitions)
    stream = readings.stream(time="at", watermark=ms.watermark("0 seconds", idle=None))
    stream.view("newest", key="k", ttl=f"{TTL} seconds")
    windows = stream.window(ms.tumbling(f"{WINDOW} seconds"), by="k").agg(v=ms.sum("v"))
    windows.view("sums", ttl=f"{TTL} seconds")
    return app


def send(folder, rows, partitions):
    with ms.connect(folder) as log:
        log.create_topic("readings", partitions=partitions, exist_ok=True)
        with log.producer() as producer:
            for partition, seconds, key, value in rows:
                at = (START + timedelta(seconds=seconds)).isoformat()
                producer.send("readings", {"at": at, "k": key, "v": value}, partition=partition)


def watermark_of(rows, partitions):
    """No partition has an older record to come: the least of their latest times, once each has one."""
    latest = [max((t for p, t, *_ in rows if p == n), default=None) for n in range(partitions)]
    return None if None in latest else min(latest)


def newest(rows, watermark):
    """Of each key the record with the latest time, unless the watermark is above that plus the ttl."""
    latest = {}
    for _, seconds, key, value in rows:
        if key not in latest or seconds > latest[key][0]:
            latest[key] = seconds, value
    if watermark is not None:
        latest = {key: row for key, row in latest.items() if row[0] + TTL >= watermark}
    return {(key, value) for key, (_, value) in latest.items()}


def sums(rows, watermark):
    """Of each window that the watermark has passed, unless it has reached its end plus the ttl."""
    if watermark is None:
        return set()
    found = {}
    for _, seconds, key, value in rows:
        start = seconds // WINDOW * WINDOW
        found.setdefault((start, key), []).append(value)
    ended = [(start, key) for start, key in found if start + WINDOW <= watermark]
    left = [one for one in ended if one[0] + WINDOW + TTL > watermark]
    return {(start, key, sum(found[start, key])) for start, key in left}


def shown(folder):
    with ms.view("newest", log=folder) as view:
        rows = set(view.scan().select("k", "v").rows())
    with ms.view("sums", log=folder) as view:
        windows = view.scan().select("window_start", "k", "v").rows()
    return rows, {(int((at - START).total_seconds()), k, v) for at, k, v in windows}


def followed(folder, name, key):
    """What somebody has who began with nothing and applied every change."""
    rows = {}
    with ms.view(name, log=folder) as view:
        for change in view.changes(since=0).to_dicts():
            identity = tuple(change[column] for column in key)
            if change["_op"] == "delete":
                del rows[identity]
            else:
                rows[identity] = {c: v for c, v in change.items() if not c.startswith("_")}
        assert sorted(rows.values(), key=str) == sorted(view.scan().to_dicts(), key=str)


@st.composite
def histories(draw):
    """Records in the order of time within each partition, so that no window takes a late one."""
    partitions = draw(st.sampled_from([1, 4, 7]))
    times = draw(st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=30))
    rows = [
        (
            draw(st.integers(0, partitions - 1)),
            t,
            draw(st.sampled_from("abc")),
            draw(st.integers(0, 9)),
        )
        for t in sorted(times)
    ]
    cut = draw(st.integers(0, len(rows)))
    dies = draw(st.none() | st.tuples(st.integers(0, 4), st.booleans()))
    return partitions, rows, cut, draw(st.integers(1, 12)), dies


class KilledError(BaseException):
    """A process is killed."""


def killing(patch, number, after):
    """Kill the run at one of its commits, before it or right after it."""
    commit, count = BatchCommitter.commit, iter(range(1000))

    def die(self, *args, **options):
        mine = next(count) == number
        if mine and not after:
            raise KilledError
        done = commit(self, *args, **options)
        if mine:
            raise KilledError
        return done

    patch.setattr(BatchCommitter, "commit", die)


@settings(max_examples=some(40))
@given(histories())
def test_a_view_has_the_rows_that_have_not_expired(history):
    partitions, rows, cut, rows_per_batch, dies = history
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for until in (cut, len(rows)):
            before = 0 if until == cut else cut
            send(folder, rows[before:until], partitions)
            options = {"engine": "local", "until": "caught-up", "rows_per_batch": rows_per_batch}
            with pytest.MonkeyPatch.context() as patch:
                if dies is not None:
                    killing(patch, *dies)
                with suppress(KilledError):
                    declare(folder, partitions).run(**options)
            declare(folder, partitions).run(**options)
            watermark = watermark_of(rows[:until], partitions)
            assert shown(folder) == (newest(rows[:until], watermark), sums(rows[:until], watermark))
        followed(folder, "newest", ("k",))
        followed(folder, "sums", ("window_start", "k"))


def test_a_late_row_of_a_key_that_expired_is_not_shown(tmp_path):
    for row in [(0, 0, "a", 1), (0, 30, "b", 2), (0, 3, "a", 3), (0, 25, "a", 4)]:
        send(tmp_path, [row], 1)
        declare(tmp_path, 1).run(engine="local", until="caught-up")
        rows, _ = shown(tmp_path)
        assert (
            rows == {1: {("a", 1)}, 2: {("b", 2)}, 3: {("b", 2)}, 4: {("a", 4), ("b", 2)}}[row[3]]
        )


def test_rows_that_replace_one_another_have_no_ttl(tmp_path):
    app = ms.App("live", log=tmp_path)
    stream = app.topic("readings", {"at": datetime, "k": str}).stream(time="at")
    counts = stream.window(ms.tumbling("1 minute"), by="k").emit("update").agg(n=ms.count())
    with pytest.raises(ConfigError, match=r"The view 'n' has a ttl .* Emit .final. above"):
        counts.view("n", ttl="1 hour")
    with pytest.raises(ConfigError, match="has no key"):
        stream.view("rows", ttl="1 hour")


def test_a_view_in_postgresql_loses_them_too(tmp_path, database):
    app = ms.App("short", log=tmp_path)
    readings = app.topic("readings", {"at": datetime, "k": str, "v": int}, partitions=1)
    stream = readings.stream(time="at", watermark=ms.watermark("0 seconds", idle=None))
    stream.view("newest", key="k", store=database, ttl=f"{TTL} seconds")
    for row, keys in [
        ((0, 0, "a", 1), ["a"]),
        ((0, 9, "b", 2), ["a", "b"]),
        ((0, 11, "c", 3), ["b", "c"]),
    ]:
        send(tmp_path, [row], 1)
        app.run(engine="local", until="caught-up")
        with ms.view("newest", store=database) as view:
            assert view.scan()["k"].sort().to_list() == keys
