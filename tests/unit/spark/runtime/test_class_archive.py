"""Where the archive of Spark's classes is kept, that only whole ones are, and who takes them over."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millstream.spark.runtime.archive_installer import await_end, install_archive
from millstream.spark.runtime.class_archive import class_archive
from millstream.spark.runtime.java import Java

JAVA = Java(Path("/java"), Path("/java/bin/java"), "17.0.1", "JAVA_HOME")
WHOLE = b"\xa8\xab\x0b\xf0 classes"
SLEEPING = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def archive_in(folder, java=JAVA, pid=2):
    return class_archive({"XDG_CACHE_HOME": str(folder)}, java, pid=pid)


def test_the_first_session_writes_what_later_ones_read(tmp_path):
    first = archive_in(tmp_path)
    assert (first.home / "bin" / "spark-submit").is_file()
    assert str(first.new) in first.option
    first.new.write_bytes(WHOLE)
    assert install_archive(first.new, first.path)
    later = archive_in(tmp_path)
    assert later.new is None
    assert str(later.path) in later.option
    assert later.path.read_bytes() == WHOLE
    later.discard()
    assert later.path.exists()


@pytest.mark.parametrize("written", [b"", b"\0" * 4, b"\0" * 4096 + b"classes"])
def test_what_a_killed_jvm_wrote_is_not_taken_over(tmp_path, written):
    first = archive_in(tmp_path)
    first.new.write_bytes(written)
    assert not install_archive(first.new, first.path)
    assert not first.new.exists()
    assert archive_in(tmp_path).new is not None


def test_a_jvm_that_wrote_nothing_leaves_nothing_to_take_over(tmp_path):
    first = archive_in(tmp_path)
    assert not install_archive(first.new, first.path)
    assert not first.path.exists()


def test_a_session_that_did_not_start_leaves_no_file(tmp_path):
    first = archive_in(tmp_path)
    first.new.write_bytes(WHOLE)
    first.discard()
    first.discard()
    assert not first.new.exists()


def test_the_keeper_waits_for_the_jvm_and_is_not_ended_with_its_program(tmp_path):
    first = archive_in(tmp_path)
    with subprocess.Popen(SLEEPING, stdin=subprocess.PIPE) as jvm:
        reap = threading.Thread(target=jvm.wait)
        reap.start()
        keeper = first.start_installer(jvm.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(2)
        keeper.send_signal(signal.SIGTERM)
        first.new.write_bytes(WHOLE)
        assert not first.path.exists()
        jvm.stdin.close()
        assert keeper.wait(30) == 0
        reap.join()
    assert first.path.read_bytes() == WHOLE
    assert [path.name for path in first.path.parent.glob("*.new")] == []


def test_a_jvm_that_does_not_end_is_killed():
    with subprocess.Popen(SLEEPING, stdin=subprocess.PIPE) as jvm:
        await_end(jvm.pid, wait_s=0.3)
        assert jvm.wait() == -signal.SIGKILL
        await_end(jvm.pid)


def test_the_first_process_of_a_container_has_none_made_but_uses_one(tmp_path):
    assert archive_in(tmp_path, pid=1) is None
    made = archive_in(tmp_path)
    made.new.write_bytes(WHOLE)
    install_archive(made.new, made.path)
    assert archive_in(tmp_path, pid=1).new is None


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


def test_the_archives_of_environments_that_are_gone_are_removed_when_one_is_made(tmp_path):
    cache, elsewhere = tmp_path / "millstream", tmp_path / "jars"
    elsewhere.mkdir()
    for name, jars in {"gone": tmp_path / "no-such", "kept": elsewhere}.items():
        (cache / name / "spark-home").mkdir(parents=True)
        (cache / name / "spark-home" / "jars").symlink_to(jars)
        (cache / name / "classes.jsa").write_bytes(WHOLE)
    (cache / "images").mkdir()
    made = archive_in(tmp_path)
    assert {path.name for path in cache.iterdir()} == {"kept", "images", made.path.parent.name}
    made.new.write_bytes(WHOLE)
    install_archive(made.new, made.path)
    elsewhere.rmdir()
    archive_in(tmp_path)  # one that has its archive does not look for others
    assert (cache / "kept").exists()


def test_each_java_has_an_archive_of_its_own(tmp_path):
    other = Java(JAVA.home, JAVA.executable, "21.0.2", "JAVA_HOME")
    assert archive_in(tmp_path).path != archive_in(tmp_path, other).path


@pytest.mark.parametrize("place", ["with a space", "file"])
def test_where_none_can_be_kept_there_is_none(tmp_path, place):
    (tmp_path / "file").write_text("")
    assert archive_in(tmp_path / place) is None
