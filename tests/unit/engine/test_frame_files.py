"""Large frames in files: the same frame comes out, and files go when nobody can want them."""

from concurrent.futures import ThreadPoolExecutor

import polars as pl
import pytest

from millstream.engine import frame_files
from millstream.engine.frame_files import FrameFiles, MappedFrames
from millstream.errors import CorruptionError
from millstream.kernels.frames import PORT_TIME, FrameRow, decode_frame, encode_frame

LARGE = pl.DataFrame({"n": range(50_000), "s": [f"text {n}" for n in range(50_000)]})
OTHER = pl.DataFrame({"n": range(40_000), "s": [f"TEXT {n}" for n in range(40_000)]})


@pytest.fixture
def files(tmp_path):
    return FrameFiles(tmp_path / "frames" / "3")


@pytest.fixture
def rewriting(tmp_path):
    return FrameFiles(tmp_path / "frames" / "3", rewrites=True)


@pytest.mark.not_in_lane("thresholds", "no frame is small there")
def test_a_large_frame_goes_by_its_name(files):
    row = FrameRow(9, 2, encode_frame(LARGE))
    sent = files.put(row)
    assert (sent.port, sent.bucket) == (9, 2)
    assert len(sent.frame) < 100
    assert decode_frame(files.get(sent).frame).equals(LARGE)
    assert files.put(sent) == sent  # a stage that only passes it on


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_table_that_the_driver_keeps_outlives_its_file(tmp_path, rewrites):
    files = FrameFiles(tmp_path / "frames" / "3", rewrites=rewrites)
    mapped = MappedFrames(files)
    kept = decode_frame(mapped.get(files.put(FrameRow(9, 2, encode_frame(LARGE)))).frame)
    part = kept[:10]
    del kept
    files.remove_batch(mapped.close())
    assert not list(files.folder.iterdir())
    files.put(FrameRow(9, 2, encode_frame(OTHER)))
    assert part.equals(LARGE[:10])


@pytest.mark.not_in_lane("thresholds", "no frame is small there")
def test_the_next_batch_writes_over_what_nobody_has_any_more(rewriting):
    rewriting.put(FrameRow(9, 2, encode_frame(LARGE)))
    mapped = MappedFrames(rewriting)
    shown = mapped.get(rewriting.put(FrameRow(9, 2, encode_frame(LARGE))))
    assert decode_frame(shown.frame).equals(LARGE)
    del shown
    before = {path.stat().st_ino for path in rewriting.folder.iterdir()}
    rewriting.remove_batch(mapped.close())
    sent = [rewriting.put(FrameRow(9, 2, encode_frame(table))) for table in (OTHER, LARGE)]
    assert {path.stat().st_ino for path in rewriting.folder.iterdir()} == before
    read = [decode_frame(rewriting.get(row).frame) for row in sent]
    assert read[0].equals(OTHER)
    assert read[1].equals(LARGE)
    rewriting.remove_batch()
    rewriting.put(sent[0]._replace(frame=encode_frame(OTHER)))
    assert read[0].equals(OTHER), "a task's rows are its own"


@pytest.mark.not_in_lane("thresholds", "no frame is small there")
def test_a_spare_file_that_a_batch_did_without_goes(rewriting):
    for _ in range(3):
        rewriting.put(FrameRow(9, 2, encode_frame(LARGE)))
    rewriting.remove_batch()
    assert len(list(rewriting.folder.iterdir())) == 3
    rewriting.put(FrameRow(9, 2, encode_frame(LARGE)))
    rewriting.remove_batch()
    assert len(list(rewriting.folder.iterdir())) == 1
    rewriting.remove_batch()
    assert not list(rewriting.folder.iterdir())


def test_only_the_largest_frames_become_spare_files_and_few(rewriting, monkeypatch):
    """Each task looks through them for each frame: two thousand took 10 ms for each, and a frame takes 0.2."""
    monkeypatch.setattr(frame_files, "_BYTES_MIN", 1)
    for size_bytes in range(1, frame_files._SPARE_FILES_MAX + 30):
        rewriting.put(FrameRow(9, 2, bytes(size_bytes)))
    rewriting.remove_batch()
    sizes = sorted(path.stat().st_size for path in rewriting.folder.iterdir())
    assert sizes == list(range(30, frame_files._SPARE_FILES_MAX + 30))


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_file_that_goes_while_a_batch_is_committed_is_no_error(tmp_path, rewrites):
    """An attempt that was given up may rename its file between a look at the folder and one at the file."""
    files = FrameFiles(tmp_path / "frames" / "3", rewrites=rewrites)
    files.put(FrameRow(9, 2, encode_frame(LARGE)))
    for name in ("a", "a.part", "a.100000.spare"):  # listed, and not there when looked at
        (files.folder / name).symlink_to("gone")
    files.remove_batch()
    files.remove_batch()
    assert not list(files.folder.iterdir())


@pytest.mark.not_in_lane("thresholds", "no frame is small there")
def test_a_small_frame_takes_no_file_of_a_much_larger_one(rewriting):
    rewriting.put(FrameRow(9, 2, encode_frame(pl.concat([LARGE] * 8))))
    rewriting.put(FrameRow(9, 2, encode_frame(LARGE)))
    rewriting.remove_batch()
    sizes = sorted(path.stat().st_size for path in rewriting.folder.iterdir())
    for _ in range(2):
        rewriting.put(FrameRow(9, 2, encode_frame(LARGE)))
    assert sorted(path.stat().st_size for path in rewriting.folder.iterdir()) == [
        sizes[0],
        sizes[0],
        sizes[1],
    ]


@pytest.mark.not_in_lane("thresholds", "no frame is small there")
def test_an_attempt_that_wakes_up_after_the_commit_writes_into_no_frame(rewriting):
    rewriting.put(FrameRow(9, 2, encode_frame(LARGE)))
    rewriting.remove_batch()
    (spare,) = rewriting.folder.iterdir()
    part = spare.rename(spare.with_suffix(".part"))  # as an attempt takes it, which then sleeps
    with part.open("r+b") as late:
        rewriting.remove_batch()
        sent = rewriting.put(FrameRow(9, 2, encode_frame(OTHER)))
        late.write(encode_frame(LARGE))
    assert decode_frame(rewriting.get(sent).frame).equals(OTHER)


@pytest.mark.not_in_lane("thresholds", "no frame is small there")
def test_several_tasks_never_take_one_spare_file(rewriting):
    rows = [FrameRow(9, n, encode_frame(LARGE.with_columns(pl.col("n") + n))) for n in range(8)]
    with ThreadPoolExecutor(8) as tasks:
        for _ in range(5):
            sent = list(tasks.map(rewriting.put, rows))
            found = [decode_frame(rewriting.get(row).frame)["n"][0] for row in sent]
            assert found == list(range(8))
            rewriting.remove_batch()


@pytest.mark.not_in_lane("thresholds", "no frame is small there")
def test_a_frame_that_was_cut_short_is_refused(files):
    sent = files.put(FrameRow(9, 2, encode_frame(LARGE)))
    (path,) = files.folder.iterdir()
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(
        CorruptionError, match=r"has 1000 bytes, and \d+ were written into it.*Run the app again"
    ):
        files.get(sent)


def test_nothing_is_left_when_a_run_has_ended(rewriting):
    rewriting.put(FrameRow(9, 2, encode_frame(LARGE)))
    rewriting.remove_batch()
    rewriting.remove_all()
    assert not rewriting.folder.exists()


@pytest.mark.not_in_lane("thresholds", "no frame is small there")
@pytest.mark.parametrize("frame", [encode_frame(LARGE.head(3)), b'{"to":9}'])
def test_small_frames_and_messages_go_as_they_are(files, frame):
    row = FrameRow(PORT_TIME, 0, frame)
    assert files.get(files.put(row)) == row
    assert not files.folder.exists()


def test_without_a_folder_all_frames_go_as_they_are():
    row = FrameRow(9, 2, encode_frame(LARGE))
    files = FrameFiles(None)
    assert files.get(files.put(row)) == row
    files.remove_earlier_runs()
    files.remove_batch()


def test_a_run_begins_without_what_earlier_runs_left(files):
    files.put(FrameRow(9, 2, encode_frame(LARGE)))
    FrameFiles(files.folder.with_name("4")).remove_earlier_runs()
    assert not files.folder.exists()
    files.remove_batch()  # of the earlier run, should it wake
