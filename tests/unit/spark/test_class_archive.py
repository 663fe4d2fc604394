"""Where the archive of Spark's classes is kept, and that only whole ones are."""

import os
from pathlib import Path

import pytest

from millstream.spark.class_archive import class_archive
from millstream.spark.java import Java

JAVA = Java(Path("/java"), Path("/java/bin/java"), "17.0.1", "JAVA_HOME")


def archive_in(folder, java=JAVA):
    return class_archive({"XDG_CACHE_HOME": str(folder)}, java)


def test_the_first_session_writes_what_later_ones_read(tmp_path):
    first = archive_in(tmp_path)
    assert (first.home / "bin" / "spark-submit").is_file()
    assert str(first.new) in first.option
    first.new.write_text("classes")
    first.keep(whole=True)
    later = archive_in(tmp_path)
    assert later.new is None
    assert str(later.path) in later.option
    assert later.path.read_text() == "classes"
    later.keep(whole=True)
    assert later.path.exists()


def test_what_a_killed_jvm_wrote_is_not_taken_over(tmp_path):
    first = archive_in(tmp_path)
    first.new.write_text("half of the classes")
    first.keep(whole=False)
    assert not first.new.exists()
    assert archive_in(tmp_path).new is not None


def test_sessions_side_by_side_write_files_of_their_own(tmp_path):
    one, other = archive_in(tmp_path), archive_in(tmp_path)
    assert one.new != other.new
    assert one.home == other.home


def test_what_no_jvm_finished_is_removed_after_a_while(tmp_path):
    left = archive_in(tmp_path).new
    left.write_text("")
    archive_in(tmp_path)
    assert left.exists()
    os.utime(left, (0, 0))
    archive_in(tmp_path)
    assert not left.exists()


def test_each_java_has_an_archive_of_its_own(tmp_path):
    other = Java(JAVA.home, JAVA.executable, "21.0.2", "JAVA_HOME")
    assert archive_in(tmp_path).path != archive_in(tmp_path, other).path


@pytest.mark.parametrize("place", ["with a space", "file"])
def test_where_none_can_be_kept_there_is_none(tmp_path, place):
    (tmp_path / "file").write_text("")
    assert archive_in(tmp_path / place) is None
