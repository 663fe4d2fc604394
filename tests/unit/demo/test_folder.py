"""The demo empties only what is its own."""

from __future__ import annotations

import pytest

from millstream.demo.folder import MARKER, DemoRun, mark_completed, prepare
from millstream.errors import ConfigError

RUN = DemoRun("ads", {"input": "week", "seed": 1, "chaos": False})
OTHER = DemoRun("ads", {"input": "generated", "seed": 2, "rate": 10, "chaos": True})


def test_an_interrupted_run_goes_on_and_a_completed_one_begins_anew(tmp_path):
    folder = tmp_path / "deep" / "demo"
    assert prepare(folder, RUN) is False
    (folder / "apps" / "ads").mkdir(parents=True)
    (folder / "LOCK").write_text("1")
    assert prepare(folder, RUN) is True
    mark_completed(folder, RUN)
    assert prepare(folder, RUN) is False
    assert [path.name for path in folder.iterdir()] == [MARKER]
    assert prepare(folder, RUN) is True


def test_another_input_is_refused_unless_it_begins_anew(tmp_path):
    prepare(tmp_path, RUN)
    (tmp_path / "data").write_text("x")
    with pytest.raises(ConfigError, match=r"with --input week --seed 1, or .* --fresh"):
        prepare(tmp_path, OTHER)
    assert prepare(tmp_path, OTHER, fresh=True) is False
    assert not (tmp_path / "data").exists()
    with pytest.raises(ConfigError, match=r"--input generated --seed 2 --rate 10 --chaos, or"):
        prepare(tmp_path, RUN)


def test_a_folder_of_somebody_else_is_never_touched(tmp_path):
    (tmp_path / "precious").write_text("x")
    for fresh in (False, True):
        with pytest.raises(ConfigError, match="not made by the demo"):
            prepare(tmp_path, RUN, fresh=fresh)
    assert (tmp_path / "precious").exists()
    assert not (tmp_path / MARKER).exists()


def test_a_mark_that_cannot_be_read_stops_the_demo(tmp_path):
    (tmp_path / MARKER).write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        prepare(tmp_path, RUN)


def test_emptying_that_was_interrupted_is_finished_by_the_next_start(tmp_path, monkeypatch):
    prepare(tmp_path, RUN)
    (tmp_path / "apps").mkdir()
    (tmp_path / "t").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path, RUN, fresh=True)
    assert prepare(tmp_path, RUN) is False
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


def test_a_mark_that_was_half_written_is_no_obstacle(tmp_path):
    (tmp_path / f"{MARKER}.new").write_text("{")
    assert prepare(tmp_path, RUN) is False
