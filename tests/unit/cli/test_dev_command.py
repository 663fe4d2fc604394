"""`millstream dev`: every save takes effect, a mistake ends nothing, and a change that does not fit is explained."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

import millstream as ms
from millstream.cli.dev import _DevRun, _DevSession
from millstream.cli.new_rows import ROWS_MAX, NewRows
from millstream.cli.program_error import ProgramError
from millstream.cli.stop import stop_app
from millstream.cli.watched_program import WatchedProgram
from millstream.engine.interrupts import Interrupts

SOURCE = Path(ms.__file__).parents[1]
PROGRAM = """
import millstream as ms
from settings import SECONDS

app = ms.App("clicks", log="data")
clicks = app.topic("clicks", {"ad": str, "at": int}, key="ad", partitions=1).stream()
clicks.group_by("ad").agg(n=ms.count()).view("ads")
"""
TICK_S = (
    0.05  # a file system's clock may be behind, and what was saved just now is loaded once more
)
WAIT_S = 240  # as a machine may be slow


def send(folder, *ads):
    with ms.connect(folder / "data") as log, log.producer() as producer:
        log.create_topic("clicks", partitions=1, exist_ok=True)
        for ad in ads:
            producer.send("clicks", {"ad": ad, "at": 1}, key=ad)


class Session:
    """A `millstream dev` in a process of its own, and what it has said."""

    def __init__(self, folder):
        self.said = ""
        self.read = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "millstream", "dev", "app.py", "--listen", "127.0.0.1:0"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self):
        for line in self.process.stdout:
            self.said += line

    def wait_for(self, text):
        """Wait until it says this, after what was waited for before."""
        end = time.monotonic() + WAIT_S
        while (found := re.compile(text).search(self.said, self.read)) is None:
            assert time.monotonic() < end, (text, self.said)
            assert self.process.poll() is None or self._thread.is_alive(), (text, self.said)
            time.sleep(0.05)
        self.read = found.end()
        return found

    def end(self):
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(WAIT_S)
        self._thread.join()
        return code


@pytest.fixture
def session(tmp_path):
    (tmp_path / "app.py").write_text(PROGRAM)
    (tmp_path / "settings.py").write_text("SECONDS = 1\n")
    opened = Session(tmp_path)
    yield opened
    if opened.process.poll() is None:
        opened.process.kill()
        opened.process.wait()
    opened.process.stdout.close()


@pytest.mark.timeout(900)
def test_every_save_takes_effect_and_no_mistake_ends_what_runs(session, tmp_path):
    app, settings = tmp_path / "app.py", tmp_path / "settings.py"
    session.wait_for("clicks runs, .* after the start; it reads clicks")
    page = session.wait_for(r"the page is at (\S+)")
    send(tmp_path, "a", "b")
    session.wait_for("batch 0: 2 read")
    session.wait_for(r"ads: 2 changes[\s\S]*\+ +a +1\n\+ +b +1\n")
    with urllib.request.urlopen(page.group(1), timeout=WAIT_S) as answer:
        assert answer.status == 200

    app.write_text(PROGRAM + "clicks.filter(\n")
    session.wait_for(r"not loaded:\n[\s\S]*SyntaxError[\s\S]*what ran before goes on")
    settings.write_text("SECOND = 1  # what app.py imports is gone\n")
    app.write_text(PROGRAM)
    session.wait_for("not loaded:[\\s\\S]*cannot import name 'SECONDS'")
    send(tmp_path, "a")
    session.wait_for(r"batch 1: 1 read[\s\S]*\+ +a +2\n")

    settings.write_text("SECONDS = 100\n")
    session.wait_for("clicks runs, .* after the save")
    app.write_text(PROGRAM + 'clicks.view("newest", key="ad")\n')
    session.wait_for("clicks runs, .* after the save")
    send(tmp_path, "c")
    session.wait_for("batch 2: 1 read")
    session.wait_for(r"newest: 1 change\n")

    app.write_text(PROGRAM.replace('group_by("ad")', 'group_by("at")'))
    session.wait_for("does not fit what was saved:\n")
    session.wait_for("millstream deploy app.py")
    session.wait_for("what ran before goes on")
    send(tmp_path, "d")
    session.wait_for("batch 3: 1 read")
    assert session.end() == 0
    assert session.said.endswith("stopped\n")
    assert "Traceback" not in session.said


def test_a_program_is_loaded_with_its_modules_as_they_are_now(tmp_path):
    (tmp_path / "app.py").write_text(
        PROGRAM.replace("ads", "ads_{SECONDS}").replace('"ads_', 'f"ads_')
    )
    (tmp_path / "settings.py").write_text("SECONDS = 1\n")
    program = WatchedProgram(tmp_path / "app.py", None, tmp_path / "other")
    time.sleep(TICK_S)
    app = program.load()
    assert [output.name for output in app.outputs] == ["ads_1"]
    assert app.folder == tmp_path / "other" / "apps" / "clicks"
    assert not program.is_changed
    (tmp_path / "settings.py").write_text("SECONDS = 22\n")
    assert program.is_changed
    assert [output.name for output in program.load().outputs] == ["ads_22"]
    assert not program.is_changed


def test_a_run_that_another_program_stops_is_told_of(tmp_path, capsys):
    (tmp_path / "app.py").write_text(PROGRAM)
    (tmp_path / "settings.py").write_text("SECONDS = 1\n")
    program = WatchedProgram(tmp_path / "app.py", None, tmp_path / "data")
    opened = _DevSession(program, None, Interrupts(), time.monotonic())
    opened._reload()
    running = opened._running
    while running.is_alive:
        stop_app("clicks", running.app.folder, "4 minutes")
    assert running.error is None
    opened._look_at_run()
    assert re.search(
        "clicks was stopped by another program[\\s\\S]*nothing runs", capsys.readouterr().out
    )
    assert opened._running is None


def test_a_run_that_has_no_folder_yet_is_stopped(tmp_path, monkeypatch):
    app, begun = ms.App("clicks", log=tmp_path / "data"), threading.Event()
    monkeypatch.setattr(app, "run", lambda **_: begun.wait())
    running = _DevRun(app, NewRows(app.state_store))
    timer = threading.Timer(0.2, begun.set)
    timer.start()
    running.stop(Interrupts())
    timer.join()
    assert (running.is_alive, app.folder.exists()) == (False, False)


NUMBERED = """
import millstream as ms
from parts.numbers import NUMBER

app = ms.App(f"a{NUMBER}", log="data")
ads = app.topic("ads", {"ad": str}, key="ad").stream().view("ads", key="ad")
"""


@pytest.fixture
def numbered(tmp_path, monkeypatch):
    """A program with a module in a folder, as Python loads it where it may write bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "app.py").write_text(NUMBERED)
    (tmp_path / "parts").mkdir()
    yield tmp_path / "parts" / "numbers.py"
    for name in [name for name in sys.modules if name.partition(".")[0] == "parts"]:
        del sys.modules[name]


def test_a_module_saved_again_within_a_second_is_loaded_as_it_is_now(tmp_path, numbered):
    program = WatchedProgram(tmp_path / "app.py", None)
    for way in (
        NUMBERED,
        NUMBERED.replace("parts.numbers import", "parts import numbers; from parts.numbers import"),
    ):
        (tmp_path / "app.py").write_text(way)
        for number in range(1, 6):
            numbered.write_text(f"NUMBER = {number}\n")  # as long as before
            assert program.load().name == f"a{number}"


def test_a_module_in_a_folder_without_init_is_not_taken_from_the_folder_as_it_was(
    tmp_path, numbered
):
    (tmp_path / "app.py").write_text(
        NUMBERED.replace("parts.numbers import NUMBER", "parts import numbers").replace(
            "{NUMBER}", "{numbers.NUMBER}"
        )
    )
    program = WatchedProgram(tmp_path / "app.py", None)
    for number in (1, 22):
        numbered.write_text(f"NUMBER = {number}\n")
        assert program.load().name == f"a{number}"


@pytest.mark.parametrize("text", [None, "NUMBER = (\n", "NUMBER = 1 / 0\n", "NONE = 1\n"])
def test_a_mistake_in_a_module_is_noticed_when_it_is_corrected(tmp_path, numbered, text):
    if text is not None:
        numbered.write_text(text)
    program = WatchedProgram(tmp_path / "app.py", None)
    time.sleep(TICK_S)
    with pytest.raises(ProgramError):
        program.load()
    assert not program.is_changed
    numbered.write_text("NUMBER = 2\n")
    assert program.is_changed
    assert program.load().name == "a2"


@pytest.mark.parametrize("loads_before", [0, 1])
def test_what_is_saved_while_a_program_is_loaded_is_loaded_next(tmp_path, numbered, loads_before):
    again = f"import pathlib; pathlib.Path({str(numbered)!r}).write_text('NUMBER = 7\\n')\n"
    program = WatchedProgram(tmp_path / "app.py", None)
    numbered.write_text("NUMBER = 1\n")
    for _ in range(loads_before):
        program.load()
    numbered.write_text(f"NUMBER = 3\n{again}")  # it is saved after Python has read it
    time.sleep(TICK_S)
    assert program.load().name == "a3"
    assert program.is_changed
    assert program.load().name == "a7"
    assert not program.is_changed


def test_a_module_that_a_function_imports_is_loaded_again(tmp_path, numbered):
    (tmp_path / "app.py").write_text(
        NUMBERED.replace("from parts.numbers import NUMBER", "NUMBER = 0")
        + "def number():\n    from parts.numbers import NUMBER\n    return NUMBER\napp.number = number\n"
    )
    program = WatchedProgram(tmp_path / "app.py", None)
    for number in (1, 2):
        numbered.write_text(f"NUMBER = {number}\n")
        assert program.load().number() == number


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = (", "SyntaxError"),
        ("def f():\n    return 1 / 0\nf()", "line 2, in f\n    return 1 / 0"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = 1", "declares no app"),
        ("import millstream as ms\nms.App('No')", "App|app"),
    ],
)
def test_a_mistake_is_shown_from_the_programs_own_lines_on(tmp_path, text, said):
    (tmp_path / "app.py").write_text(text)
    with pytest.raises(ProgramError) as raised:
        WatchedProgram(tmp_path / "app.py", None).load()
    assert re.search(said, str(raised.value))
    assert "runpy" not in str(raised.value)


def test_rows_are_shown_once_the_newest_of_many(tmp_path, capsys):
    def run():
        app = ms.App("clicks", log=tmp_path / "data")
        clicks = app.topic("clicks", {"ad": str, "at": int}, key="ad", partitions=1).stream()
        clicks.group_by("ad").agg(n=ms.count()).view("ads")
        app.run(engine="local", until="caught-up")
        return app.state_store

    rows = NewRows(tmp_path / "data" / "apps" / "clicks" / "views.db")
    rows.begin()
    rows.show()
    assert capsys.readouterr().out == ""
    send(tmp_path, *(f"a{number:02}" for number in range(ROWS_MAX + 5)))
    rows.location = run()
    rows.show()
    said = capsys.readouterr().out
    assert f"ads: {ROWS_MAX + 5} changes, the last {ROWS_MAX}" in said
    assert ("a04" in said, "a05" in said, "a14" in said) == (False, True, True)
    rows.show()
    assert capsys.readouterr().out == ""
    again = NewRows(rows.location)
    again.begin()
    send(tmp_path, "a03")
    run()
    again.show()
    assert re.search(r"ads: 1 change\n[\s\S]*\+ +a03 +2\n", capsys.readouterr().out)
