"""Alerts: when they fire, and that each is told, whatever fails on the way."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import CommandRejectedError, ConfigError, FencedError, RetriableError
from millstream.views.alerts.rule import Series
from millstream.views.alerts.sender import TargetSender
from millstream.views.alerts.state import NOTICES_MAX, Evaluation, RuleState, change
from millstream.views.alerts.targets import AlertTarget
from millstream.views.alerts.watch import AlertFile, AlertWatch, AppAlertStore
from millstream.views.sink import RunStart

LIMIT = 10.0
HELD_S, REPEAT_S = 20.0, 50.0


class Crash(BaseException):
    """The process is gone."""


class Kept:
    """What survives a crash; crashes before or after the next save, where it is asked to."""

    def __init__(self):
        self.states, self.crash = {}, None

    def load(self):
        return self.states

    def save(self, states):
        crash, self.crash = self.crash, None
        if crash == "before":
            raise Crash
        self.states = states
        if crash == "after":
            raise Crash


class Told(AlertTarget):
    """A receiver, which is told, or away, or told although that is not learnt."""

    def __init__(self, name="told"):
        self._name, self.messages, self.next = name, [], "ok"

    @property
    def name(self):
        return self._name

    def send(self, message):
        happens, self.next = self.next, "ok"
        if happens == "away":
            raise RetriableError("away")
        self.messages.append(message)
        if happens == "crash":
            raise Crash
        if happens == "lost":
            raise RetriableError("no response")


def rule(*targets, **options):
    chosen = {
        "above": LIMIT,
        "held": f"{HELD_S:g} seconds",
        "repeat": f"{REPEAT_S:g} seconds",
        **options,
    }
    return ms.alert("behind", "source_lag_seconds", tell=targets, **chosen)


def expected_kinds(looks):
    """What the table of `state.py` says, one look after the other: (time, exceeded or None)."""
    firing, since, told, kinds = False, None, 0.0, []
    for now, exceeded in looks:
        if exceeded is None:
            continue
        if exceeded:
            since = now if since is None else since
            if not firing and now - since >= HELD_S:
                firing, told = True, now
                kinds.append((now, "firing"))
            elif firing and now - told >= REPEAT_S:
                told = now
                kinds.append((now, "repeat"))
        else:
            since = None
            if firing:
                firing, told = False, now
                kinds.append((now, "resolved"))
    return kinds


LOOKS = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([True, True, False, None])),
    min_size=1,
    max_size=40,
)
FAILURES = st.sampled_from(["ok", "ok", "ok", "away", "lost", "crash", "before", "after"])


class World:
    """A figure, a clock, and a watch that can crash and start again."""

    def __init__(self, *targets, **options):
        self.now_s, self.value, self.kept = 0.0, 0.0, Kept()
        self.rule = rule(*targets, **options)
        self.start()

    def start(self):
        self.watch = AlertWatch(
            "shop", [self.rule], {"f": self.read}, self.kept, wall_clock=lambda: self.now_s
        )

    def read(self, readings):
        if self.value is None:
            raise CommandRejectedError("no figures")
        readings.add("source_lag_seconds", self.value, app="shop", topic="t", partition=0)

    def look(self):
        try:
            self.watch.look()
        except Crash:
            self.start()


@given(LOOKS)
def test_an_alert_fires_repeats_and_resolves_as_the_table_says(looks):
    target = Told()
    world = World(target)
    times = []
    for after_s, exceeded in looks:
        world.now_s += after_s
        world.value = None if exceeded is None else LIMIT + 1 if exceeded else LIMIT
        world.look()
        times.append((world.now_s, exceeded))
    assert [(one.at_s, one.kind) for one in target.messages] == expected_kinds(times)
    assert len({one.id for one in target.messages}) == len(target.messages)


@given(LOOKS, st.lists(FAILURES, max_size=40))
def test_each_notice_is_told_to_each_target_and_twice_only_where_that_was_not_learnt(
    looks, failures
):
    flaky, sound = Told("flaky"), Told("sound")
    world = World(flaky, sound, repeat=None)
    unlearnt = 0
    for number, (after_s, exceeded) in enumerate(looks):
        world.now_s += after_s
        world.value = None if exceeded is None else LIMIT + 1 if exceeded else LIMIT
        failure = failures[number] if number < len(failures) else "ok"
        if failure in ("before", "after"):
            world.kept.crash = failure
        else:
            flaky.next = failure
        world.look()
        unlearnt += failure in ("lost", "crash", "before")
    world.kept.crash, flaky.next = None, "ok"
    for _ in range(3):  # no more failures: everything is told, after the longest wait
        world.now_s += 1000.0
        world.value = None
        world.look()
    assert not world.watch.untold
    for target in (flaky, sound):
        ids = [one.id for one in target.messages]
        order = list(dict.fromkeys(ids))
        kinds = [name.rpartition("/")[2] for name in order]
        assert kinds == ["firing", "resolved"] * (len(kinds) // 2) + ["firing"] * (len(kinds) % 2)
        assert len(ids) - len(order) <= unlearnt
    assert {one.id for one in flaky.messages} == {one.id for one in sound.messages}


def test_a_target_that_is_away_holds_no_other_one_up_and_is_not_asked_at_each_look():
    away, sound = Told("away"), Told("sound")
    world = World(away, sound, held="0 seconds", repeat=None)
    world.value, away.next = LIMIT + 1, "away"
    world.look()
    assert [one.kind for one in sound.messages] == ["firing"]
    world.now_s += 1
    world.look()
    assert not away.messages  # within its wait
    world.now_s += 5
    world.look()
    assert [one.id for one in away.messages] == ["shop/behind/0/1/firing"]
    assert len(sound.messages) == 1


class Slow(Told):
    """A receiver that takes what it is told when it is let go on."""

    def __init__(self):
        super().__init__("slow")
        self.asked, self.go_on, self.fails = 0, threading.Event(), False

    def send(self, message):
        self.asked += 1
        assert self.go_on.wait(60)
        if self.fails:
            raise RetriableError("away")
        super().send(message)


@pytest.mark.parametrize("fails", [False, True])
def test_a_target_that_never_ends_its_response_is_given_up_and_asked_once_at_a_time(fails):
    slow, sound = Slow(), Told("sound")
    slow.fails, now = fails, [0.0]
    watch = AlertWatch(
        "shop",
        [rule(slow, sound, held="0 seconds", repeat=None)],
        {"f": many},
        Kept(),
        wall_clock=lambda: now[0],
        sender=TargetSender(send_max_s=0.01),
    )
    for _ in range(3):
        watch.look()
        now[0] += 1000.0
    assert (slow.asked, [one.kind for one in sound.messages]) == (1, ["firing"])
    assert len(watch.untold) == 1
    slow.go_on.set()
    slow.fails = False
    for thread in threading.enumerate():
        if thread.name == "millstream alert":
            thread.join(60)
    for _ in range(3):  # what was taken meanwhile is learnt, and not told again
        watch.look()
        now[0] += 1000.0
    assert [one.kind for one in slow.messages] == ["firing"]
    assert not watch.untold


def test_an_alert_that_was_taken_late_is_not_told_again_when_another_one_came_first():
    slow, now, value = Slow(), [0.0], [0]
    sudden = replace(rule(slow, held="0 seconds", repeat=None), name="sudden", above=LIMIT + 100)

    def read(readings):
        readings.add("source_lag_seconds", LIMIT + 1 + value[0], app="shop", topic="t", partition=0)

    watch = AlertWatch(
        "shop",
        [sudden, rule(slow, held="0 seconds", repeat=None)],
        {"f": read},
        Kept(),
        wall_clock=lambda: now[0],
        sender=TargetSender(send_max_s=0.01),
    )
    watch.look()
    assert slow.asked == 1  # of the second rule
    value[0] = 1000  # and now the first one, which is told first
    slow.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "millstream alert":
            thread.join(60)
    for _ in range(4):
        now[0] += 1000.0
        watch.look()
        for thread in threading.enumerate():
            if thread.name == "millstream alert":
                thread.join(60)
    assert sorted(one.alert for one in slow.messages) == ["behind", "sudden"]
    assert not watch.untold


def test_the_text_names_the_worst_series():
    target = Told()
    watch = AlertWatch("shop", [rule(target, held="0 seconds")], {"f": many}, Kept())
    watch.look()
    assert target.messages[0].text == (
        "millstream_source_lag_seconds is above 10: app=shop, topic=t, partition=19: 19; "
        "app=shop, topic=t, partition=18: 18; app=shop, topic=t, partition=17: 17; "
        "app=shop, topic=t, partition=16: 16; app=shop, topic=t, partition=15: 15; and 4 more"
    )


def many(readings):
    for number in range(20):
        readings.add("source_lag_seconds", number, app="shop", topic="t", partition=number)


def test_only_the_series_asked_for_count():
    target = Told()
    chosen = rule(target, held="0 seconds", where={"partition": "3"})
    AlertWatch("shop", [chosen], {"f": many}, Kept()).look()
    assert not target.messages


# Changes within a time.


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_a_counter_has_grown_by_what_it_counted_also_after_it_began_again(counts):
    values, at, expected = [], 0, 0
    for count in counts:
        if count == 20:  # its process starts again, and has counted 3 by the next look
            at = 3
            expected += 3 if values and values[-1] > 3 else at - values[-1] if values else 0
        else:
            at += count
            expected += count if values else 0
        values.append(at)
    assert change([(float(n), float(v)) for n, v in enumerate(values)], counter=True) == expected


def dead(readings, count):
    readings.add("step_exit_rows_total", count, app="a", step="s", exit="dead")


def test_a_counter_is_compared_with_what_it_was_before_the_time():
    target, now, count = Told(), [0.0], [100]
    counted = ms.alert(
        "dead", "millstream_step_exit_rows_total", over="10 minutes", above=0, tell=target
    )
    watch = AlertWatch(
        "a",
        [counted],
        {"f": lambda r: dead(r, count[0])},
        kept := Kept(),
        wall_clock=lambda: now[0],
    )
    watch.look()
    assert not target.messages  # what had been counted before is no news
    kinds = []
    for _ in range(200):
        now[0] += 15.0
        if now[0] == 300.0:
            count[0] += 2
        watch.look()
        kinds = [(one.kind, one.at_s) for one in target.messages]
    assert kinds == [("firing", 300.0), ("resolved", 900.0)]
    assert len(kept.states["dead"]["samples"]["app=a, step=s, exit=dead"]) <= 62


@given(st.lists(st.tuples(st.floats(0.1, 30), st.integers(0, 5)), min_size=2, max_size=80))
def test_thinned_samples_say_the_same_of_a_counter_as_all_of_them(steps):
    counted = ms.alert("dead", "step_exit_rows_total", over="60 seconds", above=0, tell=Told())
    state, now_s, value, all_samples = RuleState(), 0.0, 0, []
    for after_s, grown in steps:
        now_s, value = now_s + after_s, value + grown
        all_samples.append((now_s, value))
        series = counted.series(readings_of(value))
        state = Evaluation(counted, "a", now_s).next_state(state, series)
    (kept,) = state.samples.values()

    def before(at_s):
        """Return time and value of the newest sample that is so old, or else of the first."""
        return next((one for one in reversed(all_samples) if one[0] <= at_s), all_samples[0])

    began_s, began_at = before(now_s - 60.0)
    # A sample that was thinned out is represented by one less than a second before it.
    _, earlier = before(began_s - 1.0)
    assert value - began_at <= change(kept, counter=True) <= value - earlier


def readings_of(count):
    from millstream.metrics.readings import Readings

    readings = Readings()
    dead(readings, count)
    return readings


# What is declared.


@pytest.mark.parametrize(
    ("name", "metric", "options", "said"),
    [
        ("Behind", "source_lag_seconds", {"above": 1}, "lower-case"),
        ("a", "source_lag_second", {"above": 1}, "source_lag_seconds"),
        ("a", "log_sync_seconds", {"above": 1}, "no metric with one value"),
        ("a", "source_lag_seconds", {}, "above= or below="),
        ("a", "source_lag_seconds", {"above": 1, "below": 2}, "one of the two"),
        ("a", "source_lag_seconds", {"above": 1, "where": {"topics": "t"}}, "topic"),
        ("a", "app_late_events_total", {"above": 1}, 'over="10 minutes"'),
        ("a", "source_lag_seconds", {"above": 1, "tell": ()}, "told to nobody"),
        ("a", "source_lag_seconds", {"above": 1, "held": "soon"}, "held"),
        ("a", "source_lag_seconds", {"above": "300"}, "finite number"),
        ("a", "source_lag_seconds", {"above": float("nan")}, "finite number"),
        ("a", "source_lag_seconds", {"above": True}, "finite number"),
        ("a", "source_lag_seconds", {"above": 1, "over": "0 seconds"}, "time of the change"),
        ("a", "source_lag_seconds", {"above": 1, "tell": "chat"}, "tell_webhook"),
        ("a", "source_lag_seconds", {"above": 1, "tell": (Told(), Told())}, "one place"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(name, metric, options, said):
    with pytest.raises(ConfigError, match=said):
        ms.alert(name, metric, **{"tell": Told(), **options})


def test_an_app_refuses_rules_that_it_cannot_tell(tmp_path):
    app = ms.App("shop", log=tmp_path)
    app.alerts(rule(Told()))
    assert [one.name for one in app.alert_rules] == ["behind"]
    with pytest.raises(ConfigError, match="Two alerts are named 'behind'"):
        app.alerts(rule(Told()), rule(Told()))
    with pytest.raises(ConfigError, match="none of an app's"):
        app.alerts(ms.alert("disk", "log_disk_free_bytes", below=1, tell=Told()))


# Where states are kept.


def test_states_in_a_file_are_there_for_the_next_process(tmp_path):
    target = Told()
    fast = rule(target, held="0 seconds", repeat=None)
    for _ in range(2):
        AlertWatch("shop", [fast], {"f": many}, AlertFile(tmp_path / "alerts.json")).look()
    assert [one.id.split("/")[3:] for one in target.messages] == [["1", "firing"]]


def test_a_file_that_has_no_states_is_refused(tmp_path):
    (tmp_path / "alerts.json").write_text("[1]")
    with pytest.raises(ConfigError, match="no states of alerts"):
        AlertWatch("shop", [rule(Told())], {}, AlertFile(tmp_path / "alerts.json"))


def test_a_run_that_was_replaced_tells_nothing_more(tmp_path):
    from millstream.pipeline.app import App
    from millstream.views.commit.open_committer import open_committer

    app = App("shop", log=tmp_path)
    app.topic("t", {"n": int}).stream().view("v", key="n")
    target = Told()
    fast = rule(target, held="0 seconds", repeat=None)
    with open_committer(app.plan(), app.folder / "views.db", tmp_path) as committer:
        committer.begin_run("main", "one")
        store, start = committer.state_store, RunStart("shop", "main", committer.run, "one")
        AlertWatch("shop", [fast], {"f": many}, AppAlertStore(store, start)).look()
        assert [one.kind for one in target.messages] == ["firing"]
        stale = AlertWatch("shop", [fast], {"f": lambda _: None}, AppAlertStore(store, start))
        committer.begin_run("main", "one")
        newer = replace(start, run=committer.run)
        with pytest.raises(FencedError):
            stale.look()
        AlertWatch("shop", [fast], {"f": many}, AppAlertStore(store, newer)).look()
    assert [one.kind for one in target.messages] == ["firing"]  # known to the run after it


def test_an_edited_rule_forgets_whom_it_is_not_told_to_any_more():
    away, kept = Told("away"), Kept()
    away.next = "away"
    AlertWatch("shop", [rule(away, held="0 seconds")], {"f": many}, kept).look()
    watch = AlertWatch("shop", [rule(Told("other"), held="0 seconds")], {"f": many}, kept)
    watch.look()
    assert not watch.untold


def test_nothing_is_told_before_it_is_stored(tmp_path):
    target, kept = Told(), Kept()
    kept.crash = "before"
    with pytest.raises(Crash):
        AlertWatch("shop", [rule(target, held="0 seconds")], {"f": many}, kept).look()
    assert not target.messages


def test_what_cannot_be_told_for_too_long_is_given_up_and_logged(caplog):
    target = Told()
    fast, state = rule(target, held="0 seconds", repeat=None), RuleState()
    for number in range(120):
        series = [Series("partition=0", LIMIT + 1.0 - number % 2)]
        state = Evaluation(fast, "shop", float(number)).next_state(state, series)
    assert len(state.notices) == NOTICES_MAX
    assert state.notices[-1].id == "shop/behind/118000/60/resolved"
    given_up = [record for record in caplog.records if "given up" in record.getMessage()]
    assert len(given_up) == 120 - NOTICES_MAX


# What goes wrong beside the figures.


class Figures:
    """Figures of two apps, of which some cannot be read."""

    def __init__(self, metric="source_lag_seconds", **labels):
        self.metric, self.labels, self.values = metric, labels, {}

    def read(self, readings):
        for app, value in self.values.items():
            if value is not None:
                readings.add(self.metric, value, app=app, **self.labels)
        if None in self.values.values():
            raise CommandRejectedError("those of one app cannot be read")


def lags():
    return Figures(topic="t", partition=0)


def test_an_alert_of_an_app_whose_figures_are_missing_does_not_resolve_by_those_of_another():
    target, figures = Told(), lags()
    watch = AlertWatch("logs", [rule(target, held="0 seconds")], {"f": figures.read}, Kept())
    kinds = []
    for values in ({"a": 99, "b": 0}, {"a": None, "b": 0}, {"a": 99, "b": 0}, {"a": 1, "b": None}):
        figures.values = values
        watch.look()
        kinds.append([one.kind for one in target.messages])
    assert kinds == [["firing"]] * 3 + [["firing", "resolved"]]


def test_what_a_counter_counts_while_it_cannot_be_read_is_told():
    target, figures = Told(), Figures("step_exit_rows_total", step="s", exit="dead")
    counted = ms.alert("dead", "step_exit_rows_total", over="10 minutes", above=0, tell=target)
    watch = AlertWatch("logs", [counted], {"f": figures.read}, Kept())
    for values in ({"a": 5, "b": 0}, {"a": None, "b": 0}, {"a": 7, "b": 0}):
        figures.values = values
        watch.look()
    assert [one.kind for one in target.messages] == ["firing"]


def test_a_target_that_is_away_holds_the_repeats_of_no_other_one_up():
    away, sound = Told("away"), Told("sound")
    world = World(away, sound, held="0 seconds")
    world.value = LIMIT + 1
    for _ in range(3):
        away.next = "away"
        world.look()
        world.now_s += REPEAT_S
    assert [one.kind for one in sound.messages] == ["firing", "repeat", "repeat"]


def test_a_target_that_is_added_while_an_alert_fires_is_told_of_it():
    first, added, kept = Told("first"), Told("added"), Kept()
    once = {"held": "0 seconds", "repeat": None}
    AlertWatch("shop", [rule(first, **once)], {"f": many}, kept).look()
    for _ in range(2):
        AlertWatch("shop", [rule(first, added, **once)], {"f": many}, kept).look()
    assert [one.kind for one in first.messages] == ["firing"]
    assert [one.kind for one in added.messages] == ["repeat"]


def test_an_alert_has_another_id_after_a_reset():
    target = Told()
    for now_s in (1.0, 2.0):
        fast = rule(target, held="0 seconds")
        watch = AlertWatch("shop", [fast], {"f": many}, Kept(), wall_clock=lambda at=now_s: at)
        watch.look()
    assert len({one.id for one in target.messages}) == 2


def test_an_error_of_any_kind_ends_neither_the_looks_nor_the_telling_of_others(caplog):
    class Broken(Told):
        def send(self, message):
            raise ValueError("with a secret")

    def defect(_):
        raise KeyError("at")

    broken, sound = Broken("broken"), Told("sound")
    world = World(broken, sound, held="0 seconds", repeat=None)
    watch = AlertWatch("shop", [world.rule], {"defect": defect, "f": many}, Kept())
    watch.look()
    assert [one.kind for one in sound.messages] == ["firing"]
    assert watch.unread == ["defect"]
    assert "secret" not in caplog.text


def test_a_notice_is_told_though_the_disk_is_full_and_is_stored_when_it_is_not():
    target, kept = Told(), Kept()
    watch = AlertWatch("log", [rule(target, held="0 seconds")], {"f": many}, kept)
    kept.save = lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    watch.look()
    assert [one.kind for one in target.messages] == ["firing"]
    del kept.save
    watch.look()
    assert kept.states["behind"]["firing"]
    assert len(target.messages) == 1


def test_nothing_is_told_at_the_next_look_that_could_not_be_stored_at_the_last():
    target, kept = Told(), Kept()
    watch = AlertWatch("shop", [rule(target, held="0 seconds")], {"f": many}, kept)
    kept.save = lambda _: (_ for _ in ()).throw(RetriableError("the database is away"))
    for _ in range(2):
        with pytest.raises(RetriableError):
            watch.look()
    assert not target.messages


def test_a_clock_that_was_set_back_holds_nothing_up():
    target = Told()
    world = World(target, repeat=None)
    world.now_s, world.value, target.next = 1e6, LIMIT + 1, "away"
    world.look()
    for now_s in (1000.0, 1000.0 + HELD_S):
        world.now_s = now_s
        world.look()
    world.now_s += 5.0
    world.look()
    assert [one.at_s for one in target.messages] == [1000.0 + HELD_S]


def test_samples_of_another_metric_are_not_compared_with():
    target, kept = Told(), Kept()
    for metric, value in (("source_lag_records", 5), ("source_lag_seconds", 500)):
        figures = Figures(metric, topic="t", partition=0)
        figures.values = {"a": value}
        chosen = ms.alert("grows", metric, over="1 hour", above=100, tell=target)
        AlertWatch("shop", [chosen], {"f": figures.read}, kept).look()
    assert not target.messages
