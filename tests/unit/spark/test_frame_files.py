"""Large frames in files: the same frame comes out, and files go when nobody can want them."""

import polars as pl
import pytest

from millstream.kernels.frames import PORT_TIME, FrameRow, decode_frame, encode_frame
from millstream.spark.frame_files import FrameFiles

LARGE = pl.DataFrame({"n": range(50_000), "s": [f"text {n}" for n in range(50_000)]})


@pytest.fixture
def files(tmp_path):
    return FrameFiles(tmp_path / "frames" / "3")


@pytest.mark.not_in_lane("thresholds", "no frame is small there")
def test_a_large_frame_goes_by_its_name(files):
    row = FrameRow(9, 2, encode_frame(LARGE))
    sent = files.put(row)
    assert (sent.port, sent.bucket) == (9, 2)
    assert len(sent.frame) < 100
    assert decode_frame(files.get(sent).frame).equals(LARGE)
    assert files.put(sent) == sent  # a stage that only passes it on


def test_a_table_outlives_its_file(files):
    table = decode_frame(files.get(files.put(FrameRow(9, 2, encode_frame(LARGE)))).frame)
    files.remove_batch()
    assert not list(files.folder.iterdir())
    assert table.equals(LARGE)


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
