"""What becomes of a file, by the table of ``read_files``: in a folder of this machine."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import ConfigError, ConflictError, RetriableError

WEEK_S = 8 * 24 * 3600


class Clock:
    def __init__(self):
        self.now_s = 2_000_000_000.0

    def ms(self):
        return int(self.now_s * 1000)

    def s(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


class Folder:
    """A folder, and the source of it, which is opened anew for each read from the positions that were stored."""

    def __init__(self, path, **options):
        self.path, self.clock, self.positions = path, Clock(), {}
        made = ms.folder(path, **{"settled": "5 seconds", "every": "1 second"} | options)
        self.source = replace(
            made, clock_ms=self.clock.ms, monotonic_s=self.clock.s, sleep_s=self.clock.sleep
        )
        self.reader = self.source.open({})

    def write(self, name, *values, at_s=None):
        path = self.path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
        at_s = self.clock.now_s - 100 if at_s is None else at_s
        os.utime(path, (at_s, at_s))
        return path

    def reopen(self):
        self.reader.close()
        self.reader = self.source.open(json.loads(json.dumps(self.positions)))

    def read(self, *, again=True):
        """Return the values of all that there is to read now."""
        if again:
            self.reopen()
        values = []
        self.clock.now_s += 2
        while (batch := self.reader.read(0.1)) is not None and not batch.is_empty:
            values += [json.loads(value)["v"] for value in batch.values]
            for path, position in batch.positions.items():
                if position is None:
                    self.positions.pop(path, None)
                else:
                    self.positions[path] = position
        return values


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_each_new_file_is_read_once_in_the_order_of_times_then_of_paths(folder):
    now = folder.clock.now_s
    folder.write("b.jsonl", 3, at_s=now - 50)
    folder.write("deep/er/a.jsonl", 2, at_s=now - 50)
    folder.write("z.jsonl", 1, at_s=now - 60)
    assert folder.read() == [1, 3, 2]
    folder.write("a.jsonl", 4)
    assert folder.read() == [4]
    assert folder.read() == []


def test_hidden_and_unfinished_files_and_those_of_other_patterns_are_not_read(tmp_path):
    folder = Folder(tmp_path, pattern="*.jsonl*")
    names = [".a.jsonl", "_a.jsonl", "a.jsonl.tmp", "a.jsonl.part", "_spark/a.jsonl", "a.csv"]
    for name in names:
        folder.write(name, 0)
    folder.write("a.jsonl", 1)
    assert folder.read() == [1]
    assert not folder.reader.alarm


def test_files_of_no_known_format_are_named_in_an_alarm(folder):
    folder.write("notes.txt", 0)
    folder.write("a.jsonl", 1)
    assert folder.read() == [1]
    assert "notes.txt" in folder.reader.alarm
    assert "a.jsonl" not in folder.reader.alarm


def test_a_file_that_is_being_written_is_read_when_it_has_stood_still(folder):
    folder.write("a.jsonl", 1, at_s=folder.clock.now_s)
    assert folder.read(again=False) == []
    assert folder.reader.read(0.1).is_empty  # more is known to come
    folder.write("a.jsonl", 1, 2, at_s=folder.clock.now_s)
    assert folder.read(again=False) == []
    folder.clock.now_s += 6
    assert folder.read(again=False) == [1, 2]


def test_a_file_of_the_future_is_read_when_it_has_stood_still(folder):
    folder.write("a.jsonl", 1, at_s=folder.clock.now_s + 1000)
    assert folder.read(again=False) == []
    folder.clock.now_s += 6
    assert folder.read(again=False) == [1]


def test_a_file_that_was_renamed_is_not_read_again(folder):
    file = folder.write("a.jsonl", 1)
    assert folder.read() == [1]
    file.rename(folder.path / "b.jsonl")
    assert folder.read() == []
    assert list(folder.positions) == ["b.jsonl"]


def test_a_log_that_was_rotated_is_read_on_under_its_old_name(folder):
    file = folder.write("a.jsonl", 1)
    assert folder.read() == [1]
    file.rename(folder.path / "a1.jsonl")
    folder.write("a.jsonl", 2)
    assert folder.read() == [2]


def test_a_file_that_was_renamed_in_the_middle_is_read_on(tmp_path):
    folder = Folder(tmp_path)
    folder.source = replace(folder.source, records_max=2)
    file = folder.write("a.jsonl", *range(5))
    folder.reopen()
    batch = folder.reader.read(1)
    folder.positions = dict(batch.positions)
    file.rename(tmp_path / "b.jsonl")
    assert folder.read() == [2, 3, 4]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.permutations(range(4)), max_size=4), st.sampled_from(["stop", "read"]))
def test_files_that_take_one_anothers_names_are_each_read_once(tmp_path_factory, turns, changed):
    folder = Folder(tmp_path_factory.mktemp("turn"), changed=changed)
    names = [f"log.{place}.jsonl" for place in range(4)]
    for place, name in enumerate(names):
        folder.write(name, place, at_s=folder.clock.now_s - 100 - place)
    assert sorted(folder.read()) == [0, 1, 2, 3]
    for turn in turns:
        for place, name in enumerate(names):
            (folder.path / name).rename(folder.path / f"{place}.tmp")
        for place, moved in enumerate(turn):
            (folder.path / f"{place}.tmp").rename(folder.path / names[moved])
        assert folder.read() == []
        assert sorted(folder.positions) == names


def test_logs_of_many_generations_that_are_rotated_are_each_read_once(tmp_path):
    folder = Folder(tmp_path)
    for turn in range(6):
        for place in reversed(range(turn)):
            (tmp_path / f"log.{place}.jsonl").rename(tmp_path / f"log.{place + 1}.jsonl")
        folder.write("log.0.jsonl", turn, at_s=folder.clock.now_s - 100 + turn)
        assert folder.read() == [turn]


def test_a_file_that_is_renamed_to_one_that_was_read_in_part_does_not_hide_its_rest(tmp_path):
    folder = Folder(tmp_path)
    folder.source = replace(folder.source, records_max=2)
    done = folder.write("done.jsonl", 7, 8, at_s=folder.clock.now_s - 200)
    folder.write("part.jsonl", *range(5))
    folder.reopen()
    for _ in range(2):
        folder.positions |= folder.reader.read(1).positions
    assert folder.positions["part.jsonl"]["at"]
    done.rename(tmp_path / "part.jsonl")
    with pytest.raises(ConflictError, match=r"part\.jsonl has changed since it was read"):
        folder.read()
    folder.source = replace(folder.source, changed="skip")
    assert folder.read() == []
    assert "part.jsonl was replaced before it was read to its end" in folder.reader.alarm


def test_a_log_that_is_rotated_between_the_listing_and_the_opening_loses_nothing(tmp_path):
    folder = Folder(tmp_path)
    old = folder.write("log.jsonl", *range(5))
    inner, turns = folder.source.place, []

    class Rotating:
        shown = inner.shown
        files, found = inner.files, inner.found

        def open(self, name):
            if not turns:
                turns.append(old.rename(tmp_path / "log.1.jsonl"))
                folder.write("log.jsonl", *range(10, 15), at_s=folder.clock.now_s - 50)
            return inner.open(name)

    folder.source = replace(folder.source, place=Rotating(), records_max=2)
    with pytest.raises(RetriableError, match="written while it was read"):
        folder.read()
    assert folder.read() == [*range(5), *range(10, 15)]


def test_a_pipe_is_no_file_and_is_not_waited_for(folder):
    os.mkfifo(folder.path / "a.jsonl")
    folder.write("b.jsonl", 1)
    assert folder.read() == [1]


@pytest.mark.parametrize("how", ["grown", "written again", "replaced"])
def test_a_file_that_has_changed_stops_the_source(folder, how):
    folder.write("a.jsonl", 1)
    assert folder.read() == [1]
    change(folder, how)
    with pytest.raises(ConflictError, match=r"a\.jsonl has changed .* changed='skip'"):
        folder.read()


def change(folder, how):
    if how == "grown":
        folder.write("a.jsonl", 1, 2)
    elif how == "written again":
        folder.write("a.jsonl", 3, at_s=folder.clock.now_s - 50)
    else:
        other = folder.write("other.tmp", 3, at_s=folder.clock.now_s - 50)
        other.rename(folder.path / "a.jsonl")


@pytest.mark.parametrize("how", ["grown", "written again", "replaced"])
def test_it_is_passed_over_or_read_again_where_that_is_wanted(tmp_path, how):
    for changed in ("skip", "read"):
        (tmp_path / changed).mkdir()
        folder = Folder(tmp_path / changed, changed=changed)
        folder.write("a.jsonl", 1)
        assert folder.read() == [1]
        change(folder, how)
        found = folder.read()
        if changed == "skip":
            assert found == []
            assert "a.jsonl has changed" in folder.reader.alarm
        else:
            assert found == ([1, 2] if how == "grown" else [3])
        assert folder.read() == []


def test_a_file_that_is_written_while_it_is_read_leaves_nothing(folder):
    path = folder.write("a.jsonl", 1)
    inner = folder.source.place

    class Growing:
        shown = inner.shown
        files, found = inner.files, inner.found

        def open(self, name):
            stream = inner.open(name)
            with path.open("a") as more:
                more.write('{"v": 2}\n{"v"')
            return stream

    folder.source = replace(folder.source, place=Growing())
    with pytest.raises(RetriableError, match="written while it was read"):
        folder.read()
    folder.source = replace(folder.source, place=inner)
    folder.write("a.jsonl", 1, 2, 3)
    assert folder.read() == [1, 2, 3]


def test_a_file_that_is_gone_is_forgotten_and_a_new_one_of_its_name_is_read(folder):
    file = folder.write("a.jsonl", 1)
    assert folder.read() == [1]
    file.unlink()
    assert folder.read() == []
    assert folder.positions["a.jsonl"]["gone_ms"]
    folder.write("a.jsonl", 2, 2)
    assert folder.read() == [2, 2]
    (folder.path / "a.jsonl").unlink()
    assert folder.read() == []
    folder.clock.now_s += WEEK_S
    assert folder.read() == []
    assert folder.positions == {}


def test_a_disk_that_was_away_brings_nothing_again(folder):
    file = folder.write("a.jsonl", 1)
    assert folder.read() == [1]
    away = file.rename(folder.path.parent / f"{folder.path.name}-away")
    assert folder.read() == []
    away.rename(file)
    assert folder.read() == []
    assert "gone_ms" not in folder.positions["a.jsonl"]


def test_a_file_that_is_missing_in_the_middle_is_waited_for(tmp_path):
    for changed in ("stop", "read", "skip"):
        path = tmp_path / changed
        path.mkdir()
        folder = Folder(path, changed=changed)
        folder.source = replace(folder.source, records_max=2)
        file = folder.write("a.jsonl", *range(5))
        folder.reopen()
        folder.positions = dict(folder.reader.read(1).positions)
        away = file.rename(path / "away.tmp")
        if changed != "skip":
            with pytest.raises(RetriableError, match="not read to its end"):
                folder.read()
            away.rename(file)
            assert folder.read() == [2, 3, 4]
        else:
            assert folder.read() == []
            assert "removed before it was read" in folder.reader.alarm
            folder.write("notes.txt", 0)
            folder.clock.now_s += 2
            assert folder.read(again=False) == []
            assert "removed before it was read" in folder.reader.alarm
            assert "notes.txt" in folder.reader.alarm
            away.rename(file)  # it was a disk that was away
            assert folder.read() == [2, 3, 4]


def test_a_folder_that_is_not_there_is_an_error_at_first_and_waited_for_later(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        ms.folder(tmp_path / "missing").open({})
    folder = Folder(tmp_path)
    folder.positions = {"a.jsonl": {"size": 1, "mtime_ns": 1, "inode": 1, "at": None}}
    folder.source = replace(
        folder.source, place=replace(folder.source.place, folder=tmp_path / "x")
    )
    with pytest.raises(RetriableError, match="cannot be listed"):
        folder.read()


def test_positions_of_something_else_are_refused(tmp_path):
    with pytest.raises(ConflictError, match="not those of a folder"):
        ms.folder(tmp_path).open({"events": {"number": 1}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "cvs"}, "Did you mean 'csv'"),
        ({"changed": "ignore"}, 'Choose "stop"'),
        ({"delimiter": ";;"}, "Give one character"),
        ({"columns": {"id": dict}}, "Give int, float, bool or str"),
        ({"settled": "soon"}, "settled"),
    ],
)
def test_an_option_that_is_not_possible_is_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        ms.folder(tmp_path, **options)
