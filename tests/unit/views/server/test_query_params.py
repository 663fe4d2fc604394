"""Views over HTTP: points, ranges, order, exact values, and waiting for a position."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import threading
from dataclasses import dataclass
from decimal import Decimal

import polars as pl
import pytest

import millstream as ms
from millstream.views.commit.committer import BatchResult
from millstream.views.commit.open_committer import open_committer
from millstream.views.reader import state_store_path
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.server.server import serve
from millstream.views.state_store.sqlite_store import SqliteStateStore


@dataclass
class AdEvent:
    ad_id: int
    cost: Decimal
    at: dt.datetime


def of(answer, *names):
    return [tuple(row[name] for name in names) for row in answer["rows"]]


def test_all_views_are_listed_with_their_columns_rows_and_newest_change(ads, server):
    ads.commit((0, 7, 10, 1, "1.50"), (1, 7, 20, 0, "2.25"))
    views = {view["view"]: view for view in server.json("/views")["views"]}
    assert set(views) == {"ad_ctr", "budgets", "dead_letters", "stopped_ads"}
    assert views["ad_ctr"]["app"] == "ads"
    assert views["ad_ctr"]["key"] == ["window_start", "ad_id"]
    assert views["ad_ctr"]["columns"][2] == {"name": "ad_id", "type": "int"}
    assert (views["ad_ctr"]["rows"], views["ad_ctr"]["change"]) == (2, 2)
    assert views["ad_ctr"]["position"] == {"ad-events": {"0": 31, "1": 0}}


def test_a_point_a_range_and_an_order(ads, server):
    ads.commit(*((minute, ad, 10 * ad, ad, "0.10") for minute in range(4) for ad in (7, 8)))
    point = server.json("/views/ad_ctr", ad_id=7, window_start="2026-01-31T12:01:00Z")
    assert of(point, "ad_id", "shown", "cost") == [(7, 70, "0.100000000")]
    assert (point["change"], point["batch_id"], point["more"]) == (8, 0, False)
    between = {
        "window_start.from": "2026-01-31T12:01:00Z",
        "window_start.to": "2026-01-31T13:03:00+01:00",
    }
    found = server.json("/views/ad_ctr", **between, ad_id=8)
    assert of(found, "window_start") == [
        ("2026-01-31T12:01:00.000000Z",),
        ("2026-01-31T12:02:00.000000Z",),
    ]
    newest = server.json("/views/ad_ctr", order="-window_start,-ad_id", limit=3)
    assert of(newest, "window_start", "ad_id") == [
        ("2026-01-31T12:03:00.000000Z", 8),
        ("2026-01-31T12:03:00.000000Z", 7),
        ("2026-01-31T12:02:00.000000Z", 8),
    ]
    assert newest["more"]
    assert of(server.json("/views/ad_ctr", **{"ad_id.equals": 7, "shown.null": "true"})) == []


EXACT = {
    "int": (pl.Int64, [2**53 - 1, 2**53 + 1, -(2**63), None]),
    "float": (pl.Float64, [0.1, float("nan"), float("-inf"), None]),
    "decimal": (pl.Decimal(38, 2), [Decimal("0.10"), Decimal("9" * 36 + ".99"), Decimal("-1.00"), None]),
    "at": (
        pl.Datetime("us", "UTC"),
        [dt.datetime(2026, 1, 1, 0, 0, 0, 1, dt.UTC), dt.datetime(9999, 12, 31, tzinfo=dt.UTC), dt.datetime(1969, 7, 20, tzinfo=dt.UTC), None],
    ),
    "day": (pl.Date, [dt.date(2026, 1, 31), dt.date(1969, 12, 31), dt.date(9999, 1, 1), None]),
    "took": (pl.Duration("us"), [dt.timedelta(microseconds=1), dt.timedelta(days=-3), dt.timedelta(seconds=1.5), None]),
    "blob": (pl.Binary, [b"", b"\x00\xff", b"a", None]),
    "text": (pl.String, ['"', "line\nline", "☃", None]),
    "flag": (pl.Boolean, [True, False, True, None]),
}  # fmt: skip
SHOWN = {
    "int": [2**53 - 1, "9007199254740993", "-9223372036854775808", None],
    "float": [0.1, "NaN", "-Infinity", None],
    "decimal": ["0.10", "9" * 36 + ".99", "-1.00", None],
    "at": ["2026-01-01T00:00:00.000001Z", "9999-12-31T00:00:00.000000Z", "1969-07-20T00:00:00.000000Z", None],
    "day": ["2026-01-31", "1969-12-31", "9999-01-01", None],
    "took": [1e-06, -259200.0, 1.5, None],
    "blob": ["", "00ff", "61", None],
    "text": ['"', "line\nline", "☃", None],
    "flag": [True, False, True, None],
}  # fmt: skip


@pytest.fixture
def exact_server(ads, server):
    """A server with a view that has every kind, and lists."""
    types = {"k": pl.Int64, **{name: dtype for name, (dtype, _) in EXACT.items()}}
    values = {"k": [0, 1, 2, 3], **{name: rows for name, (_, rows) in EXACT.items()}}
    frame = pl.DataFrame(values, schema=types).with_columns(
        pl.Series("many", [[2**60, 1], [], None, [0]])
    )
    with SqliteStateStore(state_store_path(ads.log, "exact")) as store:
        store.declare(ViewSchema.of("v", frame, ("k",)))
        run, batch_id = store.begin_run("exact", "main", "c")
        store.commit(
            Fence("exact", "main", run, batch_id), [ViewChange("v", frame)], position={}, status={}
        )
    return server


def test_values_are_told_exactly_in_json_and_in_csv(exact_server):
    server = exact_server
    answer = server.ask("/views/v")
    rows = json.loads(answer.text)["rows"]
    assert {name: [row[name] for row in rows] for name in SHOWN} == SHOWN
    assert [row["many"] for row in rows] == [[2**60, 1], [], None, [0]]
    table = server.ask("/views/v", headers={"Accept": "text/csv"})
    assert table.headers["content-type"].startswith("text/csv")
    lines = list(csv.DictReader(io.StringIO(table.text)))
    assert [line["decimal"] for line in lines] == ["0.10", "9" * 36 + ".99", "-1.00", ""]
    assert [line["int"] for line in lines][1:3] == ["9007199254740993", "-9223372036854775808"]
    assert lines[1]["text"] == "line\nline"


def test_what_is_told_is_taken_again_in_a_query(exact_server):
    rows = exact_server.json("/views/v")["rows"]
    for name in EXACT:
        for row in rows:
            asked = {f"{name}.null": "true"} if row[name] is None else {name: _text(row[name])}
            found = exact_server.json("/views/v", **asked)["rows"]
            assert row["k"] in [each["k"] for each in found], asked


def _text(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/views/nope", 404, "There is no view 'nope'; there are: ads/ad_ctr"),
        ("/views/ad_ctr?app=nope", 404, "of an app 'nope'"),
        ("/views/ad_ctr?ad=7", 400, "has no column 'ad'; it has window_start"),
        ("/views/ad_ctr?ad_id=x", 400, "'x' is not a whole number, such as 7"),
        ("/views/ad_ctr?order=-ad", 400, "no column 'ad'"),
        ("/views/ad_ctr?limit=0", 400, "limit is '0'. Give a whole number from 1 to 100000"),
        ("/views/ad_ctr?at_least=x", 400, "at_least is 'x'. Give TOPIC/PARTITION/OFFSET"),
        ("/views/ad_ctr?at_least=%7B1", 400, "Give TOPIC/PARTITION/OFFSET"),
        ("/views/ad_ctr?at_least=t/0/1", 400, "has the topic 't', which ads does not read"),
        ("/views/ad_ctr?at_least=ad-events/2/1", 400, "the partition '2' of the topic 'ad-events'"),
        ('/views/ad_ctr?at_least={"ad-events":{"0":true}}', 400, "Give TOPIC/PARTITION/OFFSET"),
        ('/views/ad_ctr?at_least={"ad-events":{"0":"9"}}', 400, "Give TOPIC/PARTITION/OFFSET"),
        ("/views/ad_ctr?at_least=" + '{"t":' * 9_000, 400, "Give TOPIC/PARTITION/OFFSET"),
        ("/views/ad_ctr?at_least=t/0/1&timeout=5", 400, "timeout is '5'"),
        ("/views/ad_ctr?at_least=t/0/1&timeout=1h", 400, "up to 10 minutes"),
        ("/views/ad_ctr/changes?since=-1", 400, "since is '-1'"),
        ("/views/ad_ctr?cost=NaN", 400, "cannot be one (it is not finite)"),
        ("/views/ad_ctr?cost.from=-Infinity", 400, "cannot be one (it is not finite)"),
        ("/views/ad_ctr?cost=1e400", 400, "Column 'cost' of the view 'ad_ctr' keeps decimal"),
        ("/views/ad_ctr?cost=1e-400", 400, "Column 'cost' of the view 'ad_ctr' keeps decimal"),
        (f"/views/ad_ctr?ad_id={'9' * 60}", 400, "Column 'ad_id' of the view 'ad_ctr' keeps int"),
        ("/apps/nope/status", 404, "no views of an app 'nope'"),
        ("/apps/..%2Fads/status", 404, ""),
        ("/elsewhere", 404, "There is nothing to GET /elsewhere here"),
    ],
)
def test_a_mistake_is_answered_with_one_message(server, path, status, said):
    code, message = server.error(path)
    assert code == status
    assert said in message


def test_nothing_can_be_written(server):
    import urllib.error
    import urllib.request

    for method in ("POST", "PUT", "DELETE"):
        request = urllib.request.Request(server.url + "/views/ad_ctr", method=method)
        with pytest.raises(urllib.error.HTTPError, match="405") as caught:
            urllib.request.urlopen(request, timeout=60)
        caught.value.close()


def test_a_page_from_elsewhere_cannot_borrow_the_address(server):
    code, message = json_error(server.ask("/views", headers={"Host": "evil.example"}))
    assert code == 421
    assert "not 'evil.example'" in message
    assert server.ask("/views", headers={"Host": "localhost:80"}).status == 200


def json_error(answer):
    return answer.status, json.loads(answer.text)["error"]["message"]


def test_two_apps_may_have_a_view_of_one_name(ads, server):
    ads.commit((0, 7, 10, 1, "1.50"))
    other = ms.App("other", log=ads.log)
    with SqliteStateStore(other.folder / "views.db") as store:
        store.declare(ViewSchema("ad_ctr", (("k", "int"),), ("k",)))
    code, message = server.error("/views/ad_ctr")
    assert code == 400
    assert "Several apps have a view 'ad_ctr': ads, other" in message
    assert server.json("/views/ad_ctr", app="other")["rows"] == []
    assert server.json("/views/ad_ctr", app="ads")["rows"][0]["ad_id"] == 7


def test_a_query_can_wait_for_what_was_just_written(ads, server):
    ads.commit((0, 7, 1, 0, "1.00"))
    found = []
    asked = {"at_least": "ad-events/0/3", "timeout": "1 minute"}
    waiter = threading.Thread(target=lambda: found.append(server.json("/views/ad_ctr", **asked)))
    waiter.start()
    ads.commit((0, 7, 2, 0, "2.00"))
    waiter.join()
    assert found[0]["rows"][0]["shown"] == 2
    assert found[0]["position"]["ad-events"]["0"] == 3
    again = json.dumps(found[0]["position"])
    assert server.json("/views/ad_ctr", at_least=again, timeout="0 seconds")["rows"]


def test_waiting_ends_with_where_the_view_is(ads, server):
    ads.commit((0, 7, 1, 0, "1.00"))
    answer = server.ask("/views/ad_ctr", at_least="ad-events/0/9", timeout="10ms")
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "1"
    assert 'has not reached {"ad-events": {"0": 9}}' in answer.text.replace("\\", "")
    assert 'it is at {"ad-events": {"0": 1, "1": 0}}' in answer.text.replace("\\", "")


def test_views_of_a_database_are_served_beside_those_of_the_folder(ads, database, client_of):
    """They are asked for in the same way, waiting and changes included."""
    app = ms.App("elsewhere", log=ads.log, views=database)
    events = app.topic("ad-events", AdEvent).stream(time="at")
    events.select("ad_id", "cost").view("costs", key="ad_id")
    state_store = app.folder / "views.db"
    rows = pl.DataFrame({"ad_id": [7, 8], "cost": [Decimal("9.50"), Decimal("10.00")]})
    with open_committer(app.plan(), state_store, ads.log) as committer:
        committer.begin_run("main", "one")
        position = {"ad-events": {"0": 5}}
        committer.commit(0, BatchResult(rows={"costs": rows}, position=position), {})
        with serve(ads.log, listen="127.0.0.1:0", databases=[database]) as serving:
            server = client_of(serving.url)
            costs = {"cost.from": "9.75", "at_least": "ad-events/0/5", "timeout": "1 minute"}
            found = server.json("/views/costs", **costs)
            assert of(found, "ad_id", "cost") == [(8, "10.000000000")]
            assert (found["app"], found["position"]) == ("elsewhere", position)
            with server.events("/views/costs/changes?since=1") as following:
                assert following()[2]["ad_id"] == 8
                newer = rows.head(1).with_columns(cost=pl.lit(Decimal("1.00")))
                committer.commit(1, BatchResult(rows={"costs": newer}, position=position), {})
                assert following()[0] == 3


def test_a_view_that_was_not_always_fed_says_so_with_its_rows_in_the_list_and_in_the_status(
    tmp_path, client_of
):
    def commit(batch_id, *views):
        app = ms.App("later", log=tmp_path)
        events = app.topic("ad-events", AdEvent).stream(time="at").select("ad_id", "cost")
        for name in views:
            events.view(name, key="ad_id")
        rows = pl.DataFrame({"ad_id": [batch_id], "cost": [Decimal("1.00")]})
        with open_committer(app.plan(), app.folder / "views.db", tmp_path) as committer:
            assert committer.begin_run("main", "one") == batch_id
            result = BatchResult(
                rows=dict.fromkeys(views, rows), position={"ad-events": {"0": batch_id + 1}}
            )
            committer.commit(batch_id, result, {})

    commit(0, "first")
    commit(1, "first", "second")
    with serve(tmp_path, listen="127.0.0.1:0") as serving:
        server = client_of(serving.url)
        response = server.json("/views/second")
        assert response["note"].startswith("is written since")
        assert response["coverage"][0]["since"]["position"] == {"ad-events": {"0": 1}}
        assert server.json("/views/first")["note"] is None
        notes = {view["view"]: view["note"] for view in server.json("/views")["views"]}
        assert (notes["second"], notes["first"]) == (response["note"], None)
        outputs = server.json("/apps/later/status")["outputs"]
        assert [(one["name"], one["sink"], one["note"]) for one in outputs] == [
            ("first", "view", None),
            ("second", "view", response["note"]),
        ]
