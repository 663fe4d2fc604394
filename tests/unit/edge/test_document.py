"""What docs/edge.md shows is what curl says, one after the other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import millstream as ms
from millstream.edge.statsd.parser import parse_datagram

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "edge.md").read_text()
SHOWN = re.findall(r"(?ms)^```sh\n((?:curl|printf) .+?)\n```\n\n```\w*\n(.*?)^```", TEXT)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_give_what_the_document_shows(tmp_path, edge_on):
    with ms.connect(tmp_path / "data") as log:
        log.create_topic("clicks")
    with edge_on(tmp_path / "data") as edge:
        for commands, answer in SHOWN:
            script = commands.replace("http://127.0.0.1:8080", edge.url.rstrip("/"))
            assert with_one_id(said(script, len(answer.encode()))) == with_one_id(answer), commands


def with_one_id(text):
    """Return the text with one topic's id for all: it is drawn again for each topic."""
    return re.sub(r"@[0-9a-f]{32}\b", "@" + "0" * 32, text)


def said(script, length):
    """Return what a script prints; of a stream, which ends by itself only later, so many bytes."""
    if " -sN " not in script:
        return subprocess.run(
            ["sh", "-c", script], capture_output=True, check=False
        ).stdout.decode()
    words = shlex.split(script.replace("--max-time 1", "--max-time 60"))
    with subprocess.Popen(words, stdout=subprocess.PIPE) as following:
        found = following.stdout.read(length)
        following.kill()
    return found.decode()


def test_there_are_examples():
    assert len(SHOWN) == 5


def test_the_datagram_that_is_shown_gives_the_record_that_is_shown():
    line, record = re.search(
        r"(?ms)^```text\n(requests.+?)\n```\n\n```json\n(.+?)\n```", TEXT
    ).groups()
    (metric,), _ = parse_datagram(line.encode())
    assert metric.to_json().decode() == record
