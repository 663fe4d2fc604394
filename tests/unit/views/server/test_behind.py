"""Why a job is behind: what is said of any job is what a naive model says, and of a job with one trouble that trouble."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import get_args

import behind_model
import pytest
from behind_model import Batch, Known, Partition
from hypothesis import given
from hypothesis import strategies as st

from millstream.views.server.behind import BehindCause, HeldWatermark, JobFacts, findings

START = datetime(2026, 1, 1, tzinfo=UTC)


def moment(seconds):
    return START + timedelta(milliseconds=int(seconds * 1000))


def record(number, one):
    """A batch, as the history has it."""
    took_ms = float(one.took_s * 1000)
    return {
        "batch_id": number,
        "run": one.run,
        "at": moment(one.at_s).isoformat(),
        "duration_ms": took_ms,
        "phases": {"read": took_ms / 4, "stages": took_ms / 2},
        "commit_before_ms": None,
        "rows_max": one.rows_max,
        "read": one.read,
        "unread": one.unread,
        "steps": {},
        "state": {},
    }


def facts(known):
    """What the library is given of a job."""
    partitions = [
        {
            "topic": "t",
            "partition": number,
            "position": one.position,
            "end": one.end,
            "unread": None if one.end is None else one.waiting,
        }
        for number, one in enumerate(known.partitions)
    ]
    failure = {"kind": "ValueError", "reason": "no.", "advice": "Correct it."}
    run = known.alive and {"run": known.alive[0], "pid": 7, "since": moment(known.alive[1])}
    status = {
        "running": known.alive is not None,
        "runs": [{**run, "since": run["since"].isoformat()}] if run else [],
        "stopping": known.asked_to_stop and known.alive is not None,
        "failure": failure if known.failed and known.alive is None else None,
        "brokers": "kafka://b:9092" if known.brokers else None,
        "unread": known.waiting,
        "unread_since": None if known.oldest_s is None else moment(known.oldest_s).isoformat(),
        "partitions": partitions,
    }
    records = [record(number, one) for number, one in enumerate(known.batches)]
    held = [
        HeldWatermark(f"s{number}", since, ("t/0",) if by else ())
        for number, (since, by) in enumerate(known.held)
    ]
    return JobFacts("app", status, records, moment(known.now_s), held)


def causes(known):
    return {one.cause for one in findings(facts(known)) if one.cause}


COUNTS = st.sampled_from([0, 0, 1, 5, 9, 10, 10, 18, 20, 50, 100])
SECONDS = st.sampled_from([0, 1, 2, 10, 54, 60, 61]).map(Fraction) | st.integers(0, 90_000).map(
    lambda ms: Fraction(ms, 1000)
)


@st.composite
def jobs(draw):
    """Any job: of up to two runs, dead or alive, with batches and partitions as they may be."""
    at_s, batches = Fraction(0), []
    for run in range(1, draw(st.integers(1, 2)) + 1):
        for _ in range(draw(st.integers(0, 7))):
            took_s = draw(SECONDS)
            at_s += draw(st.sampled_from([took_s, took_s, took_s + 1, draw(SECONDS)]))
            may = draw(st.sampled_from([None, 10, 20]))
            batches.append(Batch(run, at_s, took_s, draw(COUNTS), draw(COUNTS), may))
    alive = draw(st.none() | st.tuples(st.integers(run, run + 1), st.just(at_s)))
    partitions = draw(
        st.lists(st.builds(Partition, COUNTS, st.none() | COUNTS | COUNTS), max_size=3)
    )
    later_s = draw(SECONDS | st.integers(280, 620).map(Fraction))
    held = draw(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=2))
    flags = [draw(st.booleans()) for _ in range(3)]
    ago_s = draw(st.none() | SECONDS | st.sampled_from([-1, 300, 301, 540, 600, 601]).map(Fraction))
    oldest_s = None if ago_s is None else at_s + later_s - ago_s
    return Known(batches, partitions, at_s + later_s, alive, *flags, oldest_s, held)


@given(jobs())
def test_the_causes_are_those_that_a_naive_model_finds(known):
    assert causes(known) == behind_model.causes(known), known


def test_the_model_knows_every_cause():
    assert {*behind_model.RULES} == {*get_args(BehindCause)}


# A job in a world that knows nothing of the rules: it lives second by second, and has one trouble.


class Living:
    """A job that reads so many records a second at most, and commits what it read each second or two."""

    def __init__(self, arriving=100, reads=200, batch_s=1, rows_max=1_000_000, each_s="0.1"):
        self.each_s = Fraction(each_s)
        self.arriving, self.reads, self.batch_s, self.rows_max = arriving, reads, batch_s, rows_max
        self.now_s, self.unread, self.read, self.run, self.batches = 0, 0, 0, 1, []

    def live(self, seconds, *, working=True):
        for _ in range(seconds):
            self.now_s += 1
            self.unread += self.arriving
            if working and self.now_s % self.batch_s == 0:
                took = min(self.unread, self.reads * self.batch_s, self.rows_max)
                busy_s = max(self.each_s, Fraction(took, self.reads))
                self.unread, self.read = self.unread - took, self.read + took
                self.batches.append(
                    Batch(self.run, Fraction(self.now_s), busy_s, took, self.unread, self.rows_max)
                )
        return self

    def known(self, *, alive=True, shares=(1,), **more):
        """What is known of it now, with what waits divided among partitions."""
        waiting = [self.unread * share // sum(shares) for share in shares]
        partitions = [Partition(self.read, self.read + one) for one in waiting]
        run = (self.run, Fraction(self.batches[-1].at_s)) if alive else None
        return Known(self.batches[-60:], partitions, Fraction(self.now_s), run, **more)


def stopped_for_an_hour():
    job = Living().live(30).live(3600, working=False)
    job.run = 2
    return job.live(5)


def idle_until_now():
    job = Living().live(60)
    job.arriving, job.unread = 0, 0
    job.live(3600, working=False)
    job.unread = 900
    return job.known(oldest_s=Fraction(job.now_s))


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (Living().live(60).known(), set()),
        (Living().live(60).live(120, working=False).known(alive=False), {"stopped"}),
        (Living().live(60).live(9, working=False).known(alive=False, failed=True), {"failed"}),
        (Living().live(60).live(300, working=False).known(), {"stalled", "backlog"}),
        (idle_until_now(), {"backlog"}),
        (
            Living(arriving=500).live(60).known(shares=(1, 1, 1)),
            {"overload", "slow-batches"},
        ),
        (
            Living(rows_max=90, each_s=1).live(120).known(shares=(1, 1)),
            {"overload", "batch-limit", "slow-batches"},
        ),
        (
            stopped_for_an_hour().known(shares=(1, 1)),
            {"was-down", "backlog", "slow-batches"},
        ),
        (
            Living(batch_s=2).live(61).known(shares=(9, 1)),
            {"one-partition"},
        ),
        (Living().live(60).known(held=[(3, True)]), {"watermark"}),
        (Living().live(60).known(asked_to_stop=True), {"stopping"}),
    ],
    ids=[
        "healthy",
        "stopped",
        "failed",
        "hangs",
        "was idle, and its first record has only just come",
        "too much arrives",
        "batches that may read little",
        "was down",
        "one partition",
        "watermark",
        "stopping",
    ],
)
def test_of_a_job_with_one_trouble_that_is_the_cause(known, expected):
    assert causes(known) == expected


def test_what_cannot_be_read_is_not_said_to_be_read():
    known = Known([], [Partition(5, None), Partition(9, 4)], Fraction(0), None)
    said = [one.sentence for one in findings(facts(known))]
    assert said[0] == "app has read all of what can be read."
    assert "How much of t/0 is unread is not known" in " ".join(said)
    assert "t/1 ends at 4, before 9" in " ".join(said)
