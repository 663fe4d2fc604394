"""`--log-format json`: all that a run has on standard error is JSON lines, whoever says it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

THREAD = (
    "import threading\none = threading.Thread(target=int, args=['x'])\none.start()\none.join()\n"
)
DEFECT = "import millstream as ms\napp = ms.App('a', log='u')\ndef run(**_):\n    raise ValueError('no')\napp.run = run\n"
SAYS = "import logging, warnings\nlogging.getLogger('other').warning('é\\nsecond line')\nwarnings.warn('old')\n"


def lines(file, text, **environment):
    """Run an app of this text as a user does; return its exit code, and each line of standard error as it was read."""
    file.write_text(SAYS + text)
    command = [sys.executable, "-m", "millstream", "run", str(file), "--log-format", "json"]
    done = subprocess.run(
        command, capture_output=True, check=False, env={**os.environ, **environment}
    )
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("text", "code", "level", "message"),
    [
        ("", 2, "error", "declares no app"),
        ("raise ValueError('no')", 2, "error", "ValueError: no"),
        (DEFECT, 1, "critical", "ValueError: no"),
    ],
)
def test_every_line_is_json_also_of_others_and_the_last_error(tmp_path, text, code, level, message):
    ended, said = lines(tmp_path / "app.py", text)
    assert ended == code
    assert [(one["logger"], one["level"]) for one in said] == [
        ("other", "warning"),
        ("py.warnings", "warning"),
        ("millstream", level),
    ]
    assert message in said[-1]["message"]
    assert ("ValueError: no" in said[-1].get("error", "")) == bool(text)


def test_every_line_is_json_in_ascii_too_also_that_of_a_thread(tmp_path):
    _, said = lines(tmp_path / "app.py", THREAD, PYTHONIOENCODING="ascii")
    assert [one["logger"] for one in said] == ["other", "py.warnings", "millstream", "millstream"]
    assert said[0]["message"] == "é\nsecond line"
    assert "ended: ValueError: invalid literal" in said[2]["message"]
    assert "Traceback" in said[2]["error"]


def test_as_text_an_error_is_one_sentence(tmp_path, call):
    (tmp_path / "app.py").write_text("")
    assert call("run", str(tmp_path / "app.py")).err.startswith("millstream: ")
