"""Which topics a state was made of: kept in the state store, and checked before a run begins."""

from __future__ import annotations

import pytest

import millstream as ms
from millstream.client.open import open_reader
from millstream.engine.topic_ids import check_same_topics, save_topic_ids
from millstream.errors import TopicRecreatedError
from millstream.kernels.plan import JobPlan, SinkPlan, SourcePlan, TopicSinkSpec
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.time.watermarks import WatermarkRule
from millstream.views.schema import Fence
from millstream.views.state_store.sqlite_store import SqliteStateStore


def plan(reads=("clicks",), writes=("out",)):
    rule = WatermarkRule(0, None)
    sources = tuple(SourcePlan(0, name, name, (), None, rule, (), ()) for name in reads)
    sinks = tuple(
        SinkPlan(f"to({name})", 8, (), (), TopicSinkSpec(name, None, (), 1, "delete"))
        for name in writes
    )
    return JobPlan("app", sources, (), (), sinks, Buckets(1))


@pytest.fixture
def log(tmp_path):
    with ms.connect(tmp_path / "log") as log:
        for topic in ("clicks", "out", "more"):
            log.create_topic(topic)
        yield log


@pytest.fixture
def run(tmp_path, log):
    """Return what begins a run, and commits its batches."""

    home_path = tmp_path / "log" / "apps" / "app" / "views.db"
    home_path.parent.mkdir(parents=True)

    def one(plan, *, batches):
        reader = open_reader(tmp_path / "log")
        check_same_topics("app", home_path, plan, reader)
        with SqliteStateStore(home_path) as state_store:
            number, first = state_store.begin_run("app", "main", "checkpoint")
            save_topic_ids("app", state_store, plan, reader)
            for batch_id in range(first, first + batches):
                fence = Fence("app", "main", number, batch_id)
                state_store.commit(fence, [], position={"clicks": {"0": 7 + batch_id}}, status={})

    return one


def test_a_run_goes_on_with_the_same_topics(run):
    for _ in range(3):
        run(plan(), batches=2)


def test_a_topic_that_was_made_anew_is_refused_with_what_was_read_and_what_to_do(run, log):
    run(plan(), batches=3)
    old = log.topics()["clicks"].topic_id
    log.delete_topic("clicks")
    log.create_topic("clicks")
    new = log.topics()["clicks"].topic_id
    with pytest.raises(TopicRecreatedError) as raised:
        run(plan(), batches=1)
    for part in (
        "'clicks' was deleted and created again",
        old,
        new,
        "0: 9",
        "millstream reset app",
    ):
        assert part in str(raised.value)


def test_a_topic_that_is_gone_is_refused_before_it_is_made(run, log):
    run(plan(), batches=1)
    log.delete_topic("clicks")
    with pytest.raises(TopicRecreatedError, match=r"'clicks' was deleted: .* there is none now"):
        run(plan(), batches=1)


def test_a_topic_that_is_written_is_asked_for_too(run, log):
    run(plan(), batches=1)
    log.delete_topic("out")
    log.create_topic("out")
    with pytest.raises(TopicRecreatedError, match="written to the old one is gone with it"):
        run(plan(), batches=1)


def test_where_no_batch_was_committed_there_is_nothing_to_go_on_from(run, log):
    run(plan(), batches=0)
    log.delete_topic("clicks")
    log.create_topic("clicks")
    run(plan(), batches=1)
    run(plan(), batches=1)


def test_a_topic_that_is_left_out_for_one_run_is_remembered(run, log):
    run(plan(writes=("out", "more")), batches=1)
    run(plan(writes=("out",)), batches=1)
    log.delete_topic("more")
    log.create_topic("more")
    run(plan(writes=("out",)), batches=1)
    with pytest.raises(TopicRecreatedError, match="'more'"):
        run(plan(writes=("out", "more")), batches=1)
