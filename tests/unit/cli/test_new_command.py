"""`millstream new`: a project whose test passes, and whose app runs."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import millstream as ms
from millstream.cli.new import FILES, create_project, new
from millstream.cli.run import find_app
from millstream.errors import ConfigError

SOURCE = Path(ms.__file__).parents[1]


@pytest.fixture
def project(tmp_path):
    return create_project("shop-1", tmp_path / "there" / "shop")


def test_a_project_has_all_its_files_with_its_name_and_no_gap(project):
    written = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert written == set(FILES)
    texts = {name: (project / name).read_text() for name in FILES}
    assert not any("$name" in text or "${" in text for text in texts.values())
    declared = tomllib.loads(texts["pyproject.toml"])
    assert declared["project"]["name"] == "shop-1"
    of_ours = [
        *declared["project"]["dependencies"],
        *declared["project"]["optional-dependencies"]["production"],
    ]
    ours = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    for one in of_ours:
        name, _, extras = one.rstrip("]").partition("[")
        assert name == ours["name"]
        assert set(extras.split(",")) <= set(ours["optional-dependencies"])


def run_in(project, *command):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "MILLSTREAM_LOG": "data"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_its_test_passes(project):
    passed = run_in(project, "pytest", "-q", "-p", "no:cacheprovider")
    assert passed.returncode == 0, passed.stdout
    assert "4 passed" in passed.stdout


@pytest.mark.long
def test_its_test_fails_when_the_app_counts_otherwise(project):
    app = (project / "app.py").read_text()
    (project / "app.py").write_text(app.replace('"1 minute"', '"2 minutes"'))
    failed = run_in(project, "pytest", "-q", "-x", "-p", "no:cacheprovider")
    assert failed.returncode == 1
    assert "test_events_are_counted_in_their_minute" in failed.stdout


def test_its_app_runs(project):
    with ms.connect(project / "data") as log, log.producer() as producer:
        log.create_topic("events")
        for second in (5, 30):
            event = {"kind": "order", "at": f"2026-01-01T12:00:{second:02}Z"}
            producer.send("events", event, key="order")
    command = ("run", "app.py", "--engine", "local", "--until", "caught-up")
    ended = run_in(project, "millstream", *command)
    assert ended.returncode == 0, ended.stderr
    with ms.view("so_far", log=project / "data") as view:
        assert view.scan().select("kind", "n").rows() == [("order", 2)]


@pytest.mark.parametrize("there", ["folder", "file"])
def test_what_exists_is_refused_and_stays_as_it_was(tmp_path, there):
    place = tmp_path / "shop"
    if there == "folder":
        place.mkdir()
    else:
        place.write_text("mine")
    with pytest.raises(ConfigError, match="exists, and nothing in it is changed"):
        create_project("shop", place)
    assert list(tmp_path.rglob("*")) == [place]


def test_a_name_that_no_app_may_have_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ConfigError, match="Shop"):
        create_project("Shop One", tmp_path / "shop")
    assert not (tmp_path / "shop").exists()


def test_the_command_says_what_to_do_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(new, ["shop"])
    assert done.exit_code == 0
    assert "cd shop && millstream dev app.py" in done.output
    assert find_app(tmp_path / "shop" / "app.py", None).name == "shop"
