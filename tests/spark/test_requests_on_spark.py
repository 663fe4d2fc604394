"""Requests of a stream on Spark: answered once each, also by a driver that is killed between its durable steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.request_model import check_kit, check_log, draw, request_app, send

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("spark")
def test_each_request_is_answered_once_on_spark(tmp_path):
    check_kit(tmp_path, 21, 2, 2, crash=0, engine="spark")


@pytest.mark.long
@pytest.mark.timeout(900)  # two JVMs for each point
@pytest.mark.parametrize("point", ["after the journal", "after the topic", "after the state store"])
def test_a_driver_that_is_killed_answers_each_request_once(tmp_path, point):
    drawn = draw(8, 50, 30, 2)
    send(tmp_path, drawn, 2)
    command = [sys.executable, "-m", "tests.request_model", "spark", str(tmp_path), point]
    codes = []
    for number in ("1", "1000"):
        ended = subprocess.run(
            [*command, number],
            cwd=ROOT,
            env=os.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        codes.append(ended.returncode)
        assert ended.returncode in (0, -9), ended.stderr
    assert codes == [-9, 0]
    check_log(request_app(tmp_path), tmp_path, drawn, 2)
