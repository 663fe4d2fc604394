"""What the page for operators is given, and who may send dead letters again."""

from __future__ import annotations

import json
import sqlite3
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest

import millstream as ms
from millstream.cli.ui import _replay
from millstream.ops.deploy import NEXT_FOLDER
from millstream.ops.previous_version import PREVIOUS_FOLDER
from millstream.views.commit import batch_history
from millstream.views.server import operations
from millstream.views.server.server import serve
from millstream.views.server.status import AppStatus


def row(minute):
    return (minute, 7, 10, 1, "0.50")


@pytest.fixture
def url(ads):
    """The address of a server that can send dead letters again, of an app that has one."""
    ads.commit(row(0), row(1), dead={0: "field 'cost' is missing"})

    replay = partial(_replay, ads.log)
    with serve(ads.log, listen="127.0.0.1:0", replay=replay) as serving:
        yield serving.url.rstrip("/")


def get(url, path):
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        return json.loads(answer.read())


def post(url, value, **headers):
    """Ask as a page of this server would; ``headers`` change that. None leaves one out."""
    given = {"Origin": url, "Content-Type": "application/json"}
    given |= {name.replace("_", "-"): text for name, text in headers.items()}
    given = {name: text for name, text in given.items() if text is not None}
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    request = urllib.request.Request(
        f"{url}/apps/ads/dead-letters/replay", body, given, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]["message"]


def end_of(ads):
    with ms.connect(ads.log) as log:
        return sum(end for _, end in log.offsets("ad-events"))


def test_load_batches_and_dead_letters_are_those_of_the_store(ads, url):
    ads.commit(row(2), late=3, unread=5)
    found = get(url, "/apps/ads/operate")
    assert found["can_replay"]
    assert found["status"]["unread"] == 5
    assert [one["read"] for one in found["batches"]] == [22, 14]
    assert found["findings"][0] == "ads has 5 unread records."
    assert found["findings"][1].startswith("It does not run: it was stopped.")
    first, second = found["batches"]
    assert (first["phases_ms"]["commit"], second["phases_ms"]["commit"]) == (12.0, 0)
    assert (first["phases_ms"]["stages"], second["late"], second["unread"]) == (145.0, 3, 5)
    assert found["load"]["steps"][0]["step"] == "tumbling(1 minute) by ad_id"
    assert found["load"]["steps"][0]["state_bytes"] == 4096
    (letter,) = found["dead_letters"]["rows"]
    assert (letter["record"], letter["value"]) == ("ad-events/0/0", "{}")
    assert letter["reason"] == "field 'cost' is missing"
    assert [one["kind"] for one in found["versions"]] == ["live"]
    # A further batch is added to what was read, and the one before gets its commit.
    ads.commit(row(3))
    again = get(url, "/apps/ads/operate")["batches"]
    assert [one["phases_ms"]["commit"] for one in again] == [12.0, 12.0, 0]


def test_batches_that_are_gone_are_not_shown_any_more(ads):
    shown = operations.AppOperations("ads", ads.app.folder)
    status = AppStatus("ads", ads.log, ads.app.folder).read(ads.state_store)
    ads.commit(row(0))
    ads.commit(row(1))
    assert len(shown.read(ads.state_store, status)["batches"]) == 2
    with closing(sqlite3.connect(ads.app.folder / "views.db")) as db, db:
        db.execute("DELETE FROM _batches WHERE batch_id > 0")
    assert [one["last_batch_id"] for one in shown.read(ads.state_store, status)["batches"]] == [0]


def test_requests_at_a_time_are_served_one_after_the_other(ads):
    ads.commit(row(0))
    inside = []

    def replay(app, records, who, *, late_ok):
        inside.append(records)
        time.sleep(0.1)
        return {"at_once": len(inside) - bool(inside.pop())}

    with (
        serve(ads.log, listen="127.0.0.1:0", replay=replay) as serving,
        ThreadPoolExecutor() as threads,
    ):
        bodies = [{"records": [f"ad-events/0/{offset}"]} for offset in range(3)]
        found = list(threads.map(partial(post, serving.url.rstrip("/")), bodies))
    assert found == [(200, {"at_once": 0})] * 3


def test_many_batches_are_means_and_sums(monkeypatch):
    monkeypatch.setattr(operations, "_POINTS", 2)
    one = {
        "at": "2026-01-01T00:00:00+00:00",
        "duration_ms": 1.0,
        "phases": {"read": 3.0},
        "unread": 1,
        "behind_s": 0.5,
        **dict.fromkeys(("read", "late", "dead", "filtered", "duplicate"), 2),
    }
    first, last = operations._points([{**one, "batch_id": number} for number in range(3)])
    assert (first["batches"], first["read"], first["phases_ms"]["read"]) == (2, 4, 3.0)
    assert (last["first_batch_id"], last["last_batch_id"], last["late"]) == (2, 2, 2)
    assert set(first["phases_ms"]) == set(batch_history.PHASES)


def test_a_dead_letter_is_sent_again_once(ads, url):
    before = end_of(ads)
    wanted = {"records": ["ad-events/0/0"]}
    status, message = post(url, wanted)
    assert (status, "may come too late" in message) == (400, True)
    assert end_of(ads) == before
    status, done = post(url, {**wanted, "late_ok": True})
    assert (status, done["records"]) == (200, 1)
    assert post(url, {**wanted, "late_ok": True})[1]["already_replayed"] == 1
    assert end_of(ads) - before in (1, 2)  # with the marker of the transaction
    assert get(url, "/apps/ads/operate")["dead_letters"]["rows"][0]["replayed_at"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": None}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Host": "elsewhere.example"}, 421),
    ],
)
def test_who_is_not_our_own_page_is_refused(ads, url, headers, status):
    before = end_of(ads)
    assert post(url, {"records": ["ad-events/0/0"], "late_ok": True}, **headers)[0] == status
    assert end_of(ads) == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"records": []}',
        b'{"records": [1]}',
        b'{"records": ["a"], "late_ok": 1}',
    ],
)
def test_a_request_of_another_form_is_refused(url, body):
    status, message = post(url, body)
    assert (status, "is not of the form" in message) == (400, True)


def test_a_server_that_was_not_given_it_only_reads(ads, server):
    ads.commit(row(0), dead={0: "bad"})
    url = server.url
    assert not get(url, "/apps/ads/operate")["can_replay"]
    assert post(url, {"records": ["ad-events/0/0"], "late_ok": True})[0] == 403


def test_versions_are_looked_for_where_deployments_keep_them():
    assert operations.VERSION_FOLDERS == (NEXT_FOLDER, PREVIOUS_FOLDER)
