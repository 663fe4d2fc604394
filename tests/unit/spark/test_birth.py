"""What is fixed at the birth of an app's state, and the refusal of what does not fit it."""

from dataclasses import dataclass
from datetime import datetime

import pytest

import millstream as ms
from millstream.errors import ConfigError, CorruptionError
from millstream.spark.birth import Birth, born, enter, require_current


@dataclass
class Event:
    at: datetime
    ad: int


def plan(size="1 hour", **aggregates):
    app = ms.App("born", log="unused")
    stream = app.topic("events", Event).stream(time="at")
    stream.window(ms.tumbling(size), by="ad").agg(**(aggregates or {"n": ms.count()})).view("v")
    return app.plan()


WANTED = Birth(4, 2, 2)


def test_an_app_without_state_is_born_as_wanted(tmp_path):
    assert born(tmp_path, WANTED) == WANTED


def test_a_later_run_keeps_the_numbers_of_the_first(tmp_path):
    identity = enter(tmp_path, WANTED, plan())
    assert born(tmp_path, Birth(4, 16, 16)) == WANTED
    assert enter(tmp_path, WANTED, plan()) == identity


def test_another_number_of_buckets_is_refused(tmp_path):
    enter(tmp_path, WANTED, plan())
    with pytest.raises(ConfigError, match="divided into 4 buckets and the app asks for 8"):
        born(tmp_path, Birth(8, 2, 2))


@pytest.mark.parametrize(
    "changed",
    [plan("2 hours"), plan(n=ms.sum("ad"), m=ms.mean("ad"))],
    ids=["window", "aggregates"],
)
def test_changed_stateful_steps_are_refused_by_name(tmp_path, changed):
    enter(tmp_path, WANTED, plan())
    with pytest.raises(ConfigError, match=r"what differs: .*'tumbling\("):
        enter(tmp_path, WANTED, changed)


def test_a_deleted_checkpoint_gets_a_new_identity(tmp_path):
    identity = enter(tmp_path, WANTED, plan())
    for path in (tmp_path / "checkpoint").iterdir():
        path.unlink()
    assert enter(tmp_path, WANTED, plan()) != identity


def test_a_damaged_record_of_birth_is_no_reason_to_guess(tmp_path):
    enter(tmp_path, WANTED, plan())
    (tmp_path / "job.json").write_text('{"buckets": 4')
    with pytest.raises(CorruptionError, match="is damaged"):
        born(tmp_path, WANTED)


def test_a_checkpoint_must_know_the_batches_that_the_views_hold(tmp_path):
    enter(tmp_path, WANTED, plan())
    require_current(tmp_path, 0)
    with pytest.raises(ConfigError, match="ends with batch -1, but the views hold batches up to 2"):
        require_current(tmp_path, 3)
    offsets = tmp_path / "checkpoint" / "offsets"
    offsets.mkdir()
    for name in ("0", "1", "2", ".2.crc"):
        (offsets / name).touch()
    require_current(tmp_path, 3)
