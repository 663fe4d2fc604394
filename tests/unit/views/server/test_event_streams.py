"""Server-sent events: every change once and in order, from any number on, however one connects."""

from __future__ import annotations

import datetime as dt
import json
import socket
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from unittest import mock
from urllib.parse import urlsplit

import polars as pl
import pytest

from millstream.kernels.frames import DIFF
from millstream.views.commit.committer import BatchResult
from millstream.views.commit.open_committer import open_committer
from millstream.views.schema import ViewSchema
from millstream.views.server import event_streams
from millstream.views.server.server import serve
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import StateStore

CHANGES = "/views/ad_ctr/changes"
NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)


def commit_one(ads, number):
    ads.commit((number, 7, number, 0, "0.00"))


def test_changes_come_from_any_number_on_and_go_on_live(ads, server):
    for number in range(3):
        commit_one(ads, number)
    with server.events(f"{CHANGES}?since=1") as following:
        assert [following()[0] for _ in range(2)] == [2, 3]
        commit_one(ads, 3)
        number, kind, data = following()
    assert (number, kind) == (4, None)
    assert (data["_seq"], data["_batch_id"], data["_op"]) == (4, 3, "upsert")
    assert (data["window_start"], data["shown"]) == ("2026-01-31T12:03:00.000000Z", 3)


def test_without_a_number_only_what_comes_from_now_on(ads, server):
    commit_one(ads, 0)
    with server.events(CHANGES) as following:
        commit_one(ads, 1)
        assert following()[0] == 2


def test_a_subscriber_that_connects_again_and_again_misses_nothing(ads, server):
    """What EventSource does: it sends the id of the last event that it has."""
    seen, last = [], "0"
    for number in range(12):
        commit_one(ads, number)
        with server.events(f"{CHANGES}?since=0", {"Last-Event-ID": last}) as following:
            for _ in range(number % 3):
                event = following()
                seen.append(event[0])
                last = str(event[0])
                if event[0] == number + 1:
                    break
    with server.events(CHANGES, {"Last-Event-ID": last}) as following:
        while seen[-1] < 12:
            seen.append(following()[0])
    assert seen == list(range(1, 13))


def test_a_delete_is_told_with_its_key(ads, server):
    commit_one(ads, 0)
    rows = ads.state_store.scan("ad_ctr").with_columns(pl.lit(-1, pl.Int8).alias(DIFF))
    ads.committer.commit(1, BatchResult(rows={"ad_ctr": rows}), ads.state_store.status("ads"))
    with server.events(f"{CHANGES}?since=1") as following:
        data = following()[2]
    assert (data["_op"], data["ad_id"], data["shown"]) == ("delete", 7, None)


def test_changes_that_are_gone_are_told_as_gone(ads, server, monkeypatch):
    monkeypatch.setattr(ads.state_store, "_changes_kept", 2)
    for number in range(4):
        commit_one(ads, number)
    with server.events(f"{CHANGES}?since=0") as following:
        _, kind, data = following()
        assert kind == "gone"
        assert (data["start"], data["end"]) == (3, 5)
        assert "changes 1 to 2 are gone" in data["message"]
        assert following() is None
    with server.events(f"{CHANGES}?since=99") as following:
        assert following()[1] == "gone"


def test_many_changes_come_in_parts(ads, server, monkeypatch):
    monkeypatch.setattr(event_streams, "_CHANGES_AT_ONCE", 3)
    ads.commit(*((minute, ad, 1, 0, "0.00") for minute in range(5) for ad in range(4)))
    with server.events(f"{CHANGES}?since=0") as following:
        assert [following()[0] for _ in range(20)] == list(range(1, 21))


def test_many_subscribers_cost_one_look_each_time(ads, server, monkeypatch):
    asked = []
    real = StateStore.changes

    def counted(store, view, *, since=0, limit=None):
        asked.append(since)
        return real(store, view, since=since, limit=limit)

    monkeypatch.setattr(StateStore, "changes", counted)
    commit_one(ads, 0)
    with ExitStack() as opened:
        follow = [opened.enter_context(server.events(f"{CHANGES}?since=0")) for _ in range(20)]
        assert {each()[0] for each in follow} == {1}
        commit_one(ads, 1)
        assert {each()[0] for each in follow} == {2}
    # Each has a store's rows from one reading; a few more look before and after the commit.
    assert asked.count(0) < 20
    assert asked.count(1) < 20


def test_a_subscriber_that_does_not_read_holds_up_nobody(ads, server):
    """It stops reading with more on its way than the sockets hold."""
    parts = urlsplit(server.url)
    rows = [(minute, ad, 1, 0, "0.00") for minute in range(200) for ad in range(300)]
    with closing(socket.create_connection((parts.hostname, parts.port))) as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.sendall(f"GET {CHANGES}?since=0 HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        ads.commit(*rows)
        with server.events(f"{CHANGES}?since=59990") as following:
            assert [following()[0] for _ in range(10)] == list(range(59_991, 60_001))
            commit_one(ads, 0)
            assert following()[0] == 60_001


def test_a_quiet_stream_shows_that_it_is_there(ads, monkeypatch):
    monkeypatch.setattr(event_streams, "HEARTBEAT_S", 0.05)
    commit_one(ads, 0)
    with serve(ads.log, listen="127.0.0.1:0") as serving:
        parts = urlsplit(serving.url)
        with closing(socket.create_connection((parts.hostname, parts.port), timeout=60)) as quiet:
            request = f"GET {CHANGES} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n"
            quiet.sendall(request.encode())
            with quiet.makefile() as lines:
                assert any(line.startswith(": still here") for line in lines)


def test_a_server_that_ends_lets_its_subscribers_go(ads):
    with ExitStack() as opened:
        with serve(ads.log, listen="127.0.0.1:0") as serving:
            parts = urlsplit(serving.url)
            connection = opened.enter_context(
                closing(HTTPConnection(parts.hostname, parts.port, timeout=60))
            )
            connection.request("GET", CHANGES)
            answer = connection.getresponse()
            assert answer.readline() == b"retry: 1000\n"
        assert b"data" not in answer.read()


def test_a_store_that_was_created_again_is_told_of(ads, server, tmp_path):
    """As `millstream demo --fresh` does beside a page that is open."""
    for number in range(3):
        commit_one(ads, number)
    with server.events(f"{CHANGES}?since=3") as following:
        state_store, schema = ads.log / "apps" / "ads", ads.state_store.schema("ad_ctr")
        for path in state_store.glob("views.db*"):
            path.unlink()
        with SqliteStateStore(state_store / "views.db") as fresh:
            fresh.declare(schema)
            assert following()[1] == "gone"
    assert server.json("/views/ad_ctr")["change"] == 0


def test_a_change_of_a_view_that_was_created_again_is_no_place_to_go_on_from(ads, server):
    for number in range(2):
        commit_one(ads, number)
    before = server.json("/views/ad_ctr")["change_id"]
    created_again(ads, "two", 5)
    after = server.json("/views/ad_ctr")["change_id"]
    assert (before.partition("-")[0], after.partition("-")[0]) == ("2", "5")
    for path, headers in [(f"{CHANGES}?since={before}", {}), (CHANGES, {"Last-Event-ID": before})]:
        with server.events(path, headers) as following:
            assert following()[1:] == (
                "gone",
                {"message": mock.ANY, "start": 1, "end": 6},
            )
    with server.events(f"{CHANGES}?since=3-{after.partition('-')[2]}") as following:
        assert following()[0] == 4


def test_a_subscriber_whose_view_is_created_again_is_told_though_it_has_as_many_changes(
    ads, server
):
    commit_one(ads, 0)
    with server.events(f"{CHANGES}?since=0") as following:
        assert following()[0] == 1
        created_again(ads, "two", 5)
        assert following()[1] == "gone"


def created_again(ads, checkpoint_id, changes):
    """Have the app start over, with so many changes at once; readers see all of it or nothing."""
    state_store = ads.log / "apps" / "ads"
    fresh = state_store.parent / "fresh.db"
    with open_committer(ads.plan, fresh, ads.log) as committer:
        committer.begin_run("main", checkpoint_id)
        columns = ads.state_store.scan("ad_ctr").clear()
        rows = pl.concat([columns, columns.clear(changes)]).with_columns(
            ad_id=pl.int_range(changes)
        )
        rows = rows.with_columns(
            window_start=pl.lit(NOON), window_end=pl.lit(NOON), shown=pl.lit(1, pl.Int64)
        )
        committer.commit(0, BatchResult(rows={"ad_ctr": rows}), {})
    for path in state_store.glob("views.db-*"):
        path.unlink()
    fresh.rename(state_store / "views.db")


@pytest.mark.parametrize("path", ["/apps/ads/status/changes", "/apps/ads/live"])
def test_the_status_comes_again_after_every_commit(ads, server, path):
    commit_one(ads, 1)
    with server.events(path) as following:

        def status():
            while (event := following())[1] != "status":
                pass
            return event[2]

        assert status()["batch_id"] == 0
        commit_one(ads, 2)
        newest = status()
        while newest["batch_id"] != 1:
            newest = status()
    assert newest["totals"]["read"] == 3


def test_panels_come_with_the_live_stream_when_their_views_change(ads, server):
    ads.commit((0, 7, 10, 1, "1.50"), spent={"acme": "80.00"})
    with server.events("/apps/ads/live") as following:
        first = [following() for _ in range(6)]
        assert [kind for _, kind, _ in first] == ["panel"] * 6
        assert [data["number"] for _, _, data in first] == list(range(6))
        ads.commit((1, 7, 30, 1, "0.50"))
        moved = []
        while len(moved) < 4:
            _, kind, data = following()
            if kind == "panel":
                moved.append(data["number"])
    assert moved == [0, 1, 2, 3]  # those of the view that moved


def test_the_dashboard_adds_up_what_the_view_has(ads, server):
    ads.commit(
        (0, 7, 10, 1, "1.50"),
        (0, 8, 30, 3, "0.10"),
        (1, 7, 0, 0, "2.00"),
        (1, 9, 50, 1, "0.20"),
        spent={"acme": "80.00", "duff": "120.50", "none": "0.00"},
        stopped=8,
    )
    panels = {p["title"]: p for p in server.json("/apps/ads/dashboard")["panels"]}
    assert panels["So far"]["rows"] == [[90, 5, "3.800000000"]]
    assert panels["Click rate per minute"]["rows"] == [
        ["2026-01-31T12:00:00.000000Z", 4 / 40],
        ["2026-01-31T12:01:00.000000Z", 1 / 50],
    ]
    assert [row[1] for row in panels["Spend per minute"]["rows"]] == ["1.600000000", "2.200000000"]
    assert panels["Top ads"]["rows"] == [
        [7, "3.500000000", 1 / 10],
        [9, "0.200000000", 1 / 50],
        [8, "0.100000000", 3 / 30],
    ]
    assert [row[0] for row in panels["Budgets"]["rows"]] == ["duff", "acme", "none"]
    assert panels["Stopped ads"]["rows"] == [["2026-01-31T12:01:00.000000Z", 8, "acme"]]
    json.dumps(panels)


def test_a_panel_shows_the_newest_stretch_only(ads, server):
    ads.commit((0, 7, 1, 0, "1.00"), (119, 7, 1, 0, "2.00"), (120, 7, 1, 0, "3.00"))
    panels = {p["title"]: p for p in server.json("/apps/ads/dashboard")["panels"]}
    assert [row[1] for row in panels["Spend per minute"]["rows"]] == ["2.000000000", "3.000000000"]


def test_a_panel_whose_view_is_gone_does_not_hide_the_others(ads, server):
    ads.commit((0, 7, 1, 0, "1.00"))
    panels = ads.state_store.description("ads", "dashboard")
    ads.state_store.put_description("ads", "dashboard", [{**panels[0], "view": "nope"}, panels[1]])
    first, second = server.json("/apps/ads/dashboard")["panels"]
    assert "There is no view 'nope'" in first["failed"]
    assert second["rows"]
    ads.state_store.declare(
        ViewSchema("nope", ads.state_store.schema("ad_ctr").columns, ("ad_id",))
    )
    first, _ = server.json("/apps/ads/dashboard")["panels"]
    assert first["rows"] == [[0, 0, "0.000000000"]]
