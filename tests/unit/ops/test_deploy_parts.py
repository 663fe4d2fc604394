"""What a deployment takes from elsewhere: a part of a program, the version before, and another deployment's folder."""

from __future__ import annotations

from contextlib import suppress
from unittest import mock

import pytest
from edited_app import START, EditedApp, answers, events, per_kind, total, windows

import millstream as ms
from millstream.errors import ConflictError
from millstream.ops import deploy as deployment
from millstream.ops.compare import compare
from millstream.ops.deploy import deploy, prepare
from millstream.ops.plan import plan_change
from millstream.views.coverage import partial_note
from millstream.views.schema import JOB
from millstream.views.store_location import open_state_store

TWO_TOPICS = """
from datetime import datetime

import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
fields = {"ad": str, "kind": str, "cost": int, "at": datetime}
before = app.topic("before", fields).stream(time="at", lateness="1 day")
clicks = app.topic("clicks", fields).stream(time="at", lateness="1 day")
last = clicks.table(key="ad", order=ORDER, name="last")
last.group_by("kind").agg(n=ms.count(), cost=ms.sum("cost")).view("kinds")
before.window(ms.tumbling("1 hour"), by="ad").emit("update").agg(n=ms.count()).view("before")
"""
SUM_TO_MAX = ('n=ms.count(), cost=ms.sum("cost")', 'n=ms.count(), cost=ms.max("cost")')
OTHER_TABLE = ('name="last"', 'ttl="900 days", name="last"')  # so that nothing is filled of it
TWO_VIEWS = """
from datetime import datetime

import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
fields = {"ad": str, "kind": str, "cost": int, "at": datetime}
clicks = app.topic("clicks", fields).stream(time="at", lateness="1 day")
counts = clicks.window(ms.tumbling("1 minute"), by="ad", name="counts").emit("update").agg(n=ms.count())
sums = clicks.window(ms.tumbling("1 minute"), by="ad", name="sums").emit("update").agg(n=ms.sum("cost"))
counts.view("one")
sums.view("two")
"""
TRIPLE = ("FACTOR = 2", "FACTOR = 3")
LONGER = ('ms.tumbling("1 minute"), by="ad"', 'ms.tumbling("2 minutes"), by="ad"')


class StoppedError(Exception):
    pass


def stop(_progress):
    raise StoppedError


def began(folder, source=None, count=150):
    edited = EditedApp(folder, 1, **({} if source is None else {"source": source}))
    edited.create()
    if source is not None:
        with ms.connect(edited.log) as log:
            log.create_topic("before", partitions=1)
    rows = events(count, 5)
    edited.append(rows)
    edited.run(edited.write())
    return edited, rows


def grow(edited, app, rows, count, seed):
    more = events(count, seed, first=len(rows))
    edited.append(more)
    edited.run(app)
    rows += more


@pytest.mark.parametrize("order", ["time", "offset"])
def test_a_part_that_reads_fewer_topics_has_the_places_of_the_whole(tmp_path, order):
    edited = EditedApp(tmp_path, 1, source=TWO_TOPICS.replace("ORDER", repr(order)))
    edited.create()
    with ms.connect(edited.log) as log:
        log.create_topic("before", partitions=1)

    def click(cost, topic="clicks"):
        edited.append([{"ad": "a1", "kind": "k", "cost": cost, "at": START}], topic)

    click(1, "before")
    click(1)
    edited.run(edited.write())
    deploy(edited.write(SUM_TO_MAX, OTHER_TABLE))
    click(5)
    edited.run(edited.write(SUM_TO_MAX, OTHER_TABLE))
    deploy(edited.write())  # begins with the state of the whole program, and reads one topic
    assert edited.views(edited.write())["kinds"] == {("k", 1, 5)}
    click(9)
    edited.run(edited.write())  # goes on with the state of the part
    assert edited.views(edited.write())["kinds"] == {("k", 1, 9)}


def test_going_back_is_possible_where_a_topic_was_empty(tmp_path):
    edited, rows = began(tmp_path, TWO_TOPICS.replace("ORDER", '"time"'), 20)
    union = ("clicks.table", "clicks.union(before).table")
    deploy(edited.write(union))
    deploy(edited.write(union, SUM_TO_MAX, OTHER_TABLE))
    grow(edited, edited.write(union, SUM_TO_MAX, OTHER_TABLE), rows, 10, 6)
    app = edited.write(union)
    assert deploy(app).records == 10
    last = {row["ad"]: row for row in rows}.values()
    kinds = {row["kind"] for row in last}
    costs = {kind: [row["cost"] for row in last if row["kind"] == kind] for kind in kinds}
    assert edited.views(app)["kinds"] == {(k, len(c), sum(c)) for k, c in costs.items()}


def test_going_back_where_the_log_has_lost_what_came_since_begins_with_what_it_holds(tmp_path):
    edited, rows = began(tmp_path)
    deploy(edited.write(TRIPLE))
    grow(edited, edited.write(TRIPLE), rows, 100, 6)
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 200)
    app = edited.write()
    assert deploy(app, gone_ok=True).records == 50
    assert edited.views(app) == answers(rows) | {"per_kind": per_kind(rows[200:])}
    with open_state_store(app.state_store, readonly=True) as store:
        assert "clicks/0 200" in str(partial_note(store.coverage("per_kind")))


def test_what_was_computed_is_not_used_where_the_log_has_lost_what_follows(tmp_path):
    edited, rows = began(tmp_path)
    app = edited.write(TRIPLE)
    with suppress(StoppedError):
        deploy(app, stop, rows_per_batch=40)
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 100)
    assert deploy(app, gone_ok=True).records == 50
    assert edited.views(app)["per_kind"] == per_kind(rows[100:], 3)


@pytest.mark.parametrize("work", [deploy, compare])
def test_beside_a_deployment_there_is_no_other_and_no_comparison(tmp_path, work):
    edited, rows = began(tmp_path)
    other, app = edited.write(("FACTOR = 2", "FACTOR = 9")), edited.write(TRIPLE)
    tried = []

    def meanwhile(_folder):
        tried.append(True)
        with pytest.raises(ConflictError, match="Another deployment or comparison"):
            work(other, stop, rows_per_batch=40)
        return []

    with mock.patch.object(deployment, "active_runs", meanwhile):
        assert deploy(app).switched
    assert tried
    assert edited.views(app) == answers(rows) | {"per_kind": per_kind(rows, 3)}


def test_a_program_that_was_compared_with_another_one_does_not_take_its_place(tmp_path):
    edited, rows = began(tmp_path)
    late = edited.write(TRIPLE)
    plan = plan_change(late)
    prepared = prepare(late, plan, same_expressions=False, gone_ok=False, ask_again=False)
    first = edited.write(LONGER)
    deploy(first)
    prepared.compute(None, 1000)
    with pytest.raises(ConflictError, match="Another program of ads was deployed"):
        prepared.switch()  # it would have begun the steps that it keeps with nothing
    assert edited.views(first)["per_kind"] == per_kind(rows)
    grow(edited, first, rows, 40, 6)
    assert edited.views(first)["per_kind"] == per_kind(rows)


def test_a_program_does_not_take_the_place_of_one_that_another_machine_has_deployed_meanwhile(
    tmp_path,
):
    edited, rows = began(tmp_path)
    late = edited.write(TRIPLE)
    plan = plan_change(late)
    first = edited.write(('per_ad.view("per_ad")', 'per_ad.drop("cost").view("per_ad")'))
    assert deploy(first).switched  # the steps are those of before, a view is another one
    prepared = prepare(late, plan, same_expressions=False, gone_ok=False, ask_again=False)
    prepared.compute(None, 1000)
    with open_state_store(late.state_store, readonly=True) as store:
        newest = store.newest_run("ads", JOB)
        with pytest.raises(ConflictError, match=r"millstream plan.*deploy again"):
            prepared.switch()
        assert store.newest_run("ads", JOB) == newest  # a run of the other machine goes on
    grow(edited, first, rows, 40, 6)
    expected = answers(rows)
    assert edited.views(first) == expected | {"per_ad": {row[:4] for row in expected["per_ad"]}}


def test_views_that_change_their_steps_are_computed_anew(tmp_path):
    edited, rows = began(tmp_path, TWO_VIEWS)
    app = edited.write(
        ('counts.view("one")', 'counts.view("two")'), ('sums.view("two")', 'sums.view("one")')
    )
    found = {part.name: part for part in plan_change(app).change.parts if part.kind == "view"}
    assert {part.verdict for part in found.values()} == {"rebuilds"}
    assert found["one"].why[0] == "it has the rows of another step"
    deploy(app)
    grow(edited, app, rows, 50, 6)
    assert edited.views(app) == {
        "one": windows(rows, "ad", total("cost")),
        "two": windows(rows, "ad", len),
    }


CLICKS = (
    'clicks.select(window_start="at", window_end="at", ad="ad", n="cost")'
    '.view("one", key=["window_start", "ad"])'
)


@pytest.mark.parametrize(
    ("one", "step"), [('counts.view("one")', "counts"), (CLICKS, None)], ids=["branch", "topic"]
)
def test_a_view_that_no_longer_reads_a_step_has_none_of_its_rows(tmp_path, one, step):
    both = (
        'counts.view("one")',
        "counts.union(sums.with_columns(ad=pl.col('ad') + '!')).view('one', key=['window_start', 'ad'])",
    )
    source = TWO_VIEWS.replace(*both).replace("import mill", "import polars as pl\nimport mill")
    edited, rows = began(tmp_path, source)
    assert any(row[2].endswith("!") for row in edited.views(edited.write())["one"])
    app = edited.write((both[1], one))
    parts = {(part.kind, part.name): part for part in plan_change(app).change.parts}
    assert parts["view", "one"].why[0] == "it has the rows of a step that it no longer reads"
    assert [name for kind, name in parts if parts[kind, name].verdict == "rebuilds"] == [
        *filter(None, [step]),
        "one",
    ]
    deploy(app)
    grow(edited, app, rows, 50, 6)
    expected = {(row["at"], row["at"], row["ad"], row["cost"]) for row in rows}
    assert edited.views(app)["one"] == (windows(rows, "ad", len) if step else expected)
