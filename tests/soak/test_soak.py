"""The soak, for two minutes; and on brokers with defects, which it must find."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
from soak.faulty_broker import DEFECTS
from soak.run import report, soak

TELLS = {  # one of these must be found
    "loses_records": {"lost-write", "unseen", "duplicate-offset"},
    "doubles_records": {"duplicate"},
    "shows_aborted": {"aborted-read"},
    "shows_open": {"precommitted-read", "aborted-read"},
    "forgets_offsets": {"offset-regression"},
    "commits_offsets_alone": {"aborted-offsets", "never-transformed"},
}
TOGETHER = [
    "loses_records,forgets_offsets,shows_aborted",
    "doubles_records,shows_open",
    "commits_offsets_alone",  # with shows_open, aborted results are seen, and none is missed
]


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_two_minutes_of_faults_leave_no_trace(tmp_path: Path) -> None:
    run = soak(tmp_path / "soak", seconds=90, seed=7, every_s=3.0, forgetting=False)
    text = report(run, seed=7, commit="this")
    assert run.complete, text
    assert (run.found, run.problems, run.hung) == ([], [], {}), text
    assert sum(run.faults.values()) > 8, text
    for kind in ("send", "transaction", "poll", "commit", "committed"):
        assert any((one.kind, one.outcome) == (kind, "ok") for one in run.operations), text


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("defects", TOGETHER)
def test_a_broker_with_defects_is_found_out(tmp_path: Path, defects: str) -> None:
    """How much is done in so many seconds is the machine's affair, so they may become more."""
    words = (sys.executable, "-m", "soak.faulty_broker", defects, "broker")
    found: set[str] = set()
    for seed, seconds in enumerate((8, 24, 72, 144)):
        run = soak(
            tmp_path / f"soak-{seconds}",
            seconds=seconds,
            seed=seed,
            every_s=60,
            settle_s=1,
            forgetting=False,
            broker_words=words,
        )
        found |= {one.kind for one in run.found}
        if all(found & TELLS[defect] for defect in defects.split(",")):
            return
    raise AssertionError((found, run.problems))


def test_every_defect_is_put_to_the_test() -> None:
    assert {one for some in TOGETHER for one in some.split(",")} == TELLS.keys() == DEFECTS.keys()
