"""What a deployment shows of its progress: on a terminal, and on a pipe."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from millstream.cli.deploy import shown_batches
from millstream.engine.local_run import LocalProgress

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(batches, *, terminal=True, as_json=False):
    """Return the lines that are drawn of batches: the seconds that each took, how many records it read, and how many are left."""
    text, seconds = io.StringIO(), [0.0]
    console = Console(file=text, force_terminal=terminal, width=100, legacy_windows=False)
    with shown_batches(
        as_json=as_json, records_per_second=None, console=console, clock=lambda: seconds[0]
    ) as on_batch:
        for number, (took_s, read, left) in enumerate(batches):
            seconds[0] += took_s
            on_batch(LocalProgress(number, read, left, {}))
    plain = ESCAPES.sub("", text.getvalue()).replace("\r", "\n")
    return [*dict.fromkeys(line.strip() for line in plain.splitlines() if "records" in line)]


def test_a_terminal_is_shown_records_rate_and_when_all_are_read():
    lines = shown([(10, 1000, 3000), (10, 3000, 1000), (10, 1000, 0)])
    said = [re.sub(r"^reading the log [━╸╺ ]+", "", line) for line in lines]
    assert said == [
        "1,000 of 4,000 records, 100/s, caught up in 30 seconds",
        "4,000 of 5,000 records, 200/s, caught up in 5 seconds",
        "5,000 of 5,000 records, 167/s, caught up",
    ]


def test_a_log_that_grows_moves_the_end_and_a_first_batch_without_records_promises_nothing():
    lines = shown([(60, 0, 600), (60, 120, 7200)])
    assert "0 of 600 records, 0/s, nothing read yet" in lines[0]
    assert "120 of 7,320 records, 1/s, caught up in 2 hours" in lines[1]


@pytest.mark.parametrize("options", [{"terminal": False}, {"as_json": True}])
def test_a_pipe_and_json_are_shown_nothing(options):
    text = shown([(10, 1000, 0)], **options)
    assert text == []


def test_standard_error_that_is_a_pipe_stays_empty(capfd):
    with shown_batches(as_json=False, records_per_second=None) as on_batch:
        on_batch(LocalProgress(0, 5, 5, {}))
    assert capfd.readouterr() == ("", "")
