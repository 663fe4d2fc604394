"""Without a name the log is MILLSTREAM_LOG, or else ./data: in the Python API as in every command."""

from pathlib import Path

import click
import pytest

import millstream as ms
from millstream.cli.main import COMMANDS, millstream
from millstream.client.default_log import LOG_VARIABLE, default_log
from millstream.views.reader import UnknownViewError


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "elsewhere"))
    return tmp_path / "elsewhere"


def test_it_is_the_variable_or_the_folder_data(elsewhere, monkeypatch):
    assert default_log() == str(elsewhere)
    for empty in ("", None):
        monkeypatch.setenv(LOG_VARIABLE, empty) if empty is not None else monkeypatch.delenv(
            LOG_VARIABLE
        )
        assert default_log() == Path("data")


def test_the_python_interface_goes_by_it(elsewhere):
    with ms.connect() as log:
        log.create_topic("t")
    assert (elsewhere / "FORMAT").exists()
    assert ms.App("a").folder == elsewhere / "apps" / "a"
    assert ms.sink(ms.to_http("http://h"), topic="t").log == str(elsewhere)
    with pytest.raises(UnknownViewError, match="elsewhere"):
        ms.view("v")


def test_a_log_that_is_named_goes_before_it(elsewhere):
    assert ms.App("a", log="here").folder == Path("here/apps/a")
    app = ms.App("a")
    app.use_log("there")
    assert app.folder == Path("there/apps/a")


def _parameters(command, path):
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from _parameters(command.get_command(context, name), f"{path} {name}")
        return
    for parameter in command.params:
        is_log = "--log" in parameter.opts
        if is_log or (parameter.metavar or "").startswith(("[DIR", "DIR")):
            yield path, parameter


def test_every_command_that_takes_a_log_goes_by_it():
    # A demo begins by emptying its log; who takes a program has the app's own log, which goes by the variable.
    names = (
        *("run", "dev", "ask", "plan", "compare", "deploy", "rollback"),
        *("capture-incident", "why record", "why match", "why value"),
    )
    with_a_program = {f"millstream {name}" for name in names}
    apart = {"millstream demo ads", *with_a_program}
    found = list(_parameters(millstream, "millstream"))
    wrong = {path for path, parameter in found if parameter.envvar != LOG_VARIABLE}
    assert wrong == apart
    assert len(found) > 20
    assert COMMANDS
