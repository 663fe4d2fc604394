"""Rows of an address that is asked again and again: which are new, pages, and what a server may answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from urllib.parse import parse_qs, urlsplit

import http_service
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.cli.main import run as run_command
from millstream.client import connect
from millstream.connectors.json_page import JsonPage
from millstream.connectors.urls import connector_of
from millstream.errors import ConfigError, ConflictError, RetriableError


def source(connector, log):
    return ms.source(connector, topic="events", to=log)


def run(service, log, path="/", **options):
    return source(ms.http_poll(service.url + path, **options), log).run(until="caught-up")


def raw(log):
    with connect(log) as opened:
        if "events" not in opened.topics():
            return []
        return opened.read("events", 0, columns=("value",)).column("value").to_pylist()


def values(log):
    return [json.loads(value) for value in raw(log)]


def dead(log):
    with connect(log) as opened:
        rows = opened.read("events.dead", 0, columns=("headers",)).column("headers").to_pylist()
    return [{one["key"]: one["value"].decode() for one in row} for row in rows]


class Answers:
    """A server that gives what it was last told to, whatever it is asked."""

    def __init__(self, said):
        self.said = said

    def __call__(self, asked, _number):
        return 200, self.said


# ── which rows are new ──────────────────────────────────────────────────────────────────────


def test_without_a_cursor_a_row_is_taken_when_it_was_not_in_the_last_answer(tmp_path):
    answers = Answers([{"id": 1, "at": "A"}, {"id": 2, "at": "B"}, {"id": 1, "at": "A"}])
    with http_service.serving(answers) as service:
        assert run(service, tmp_path).records == run(service, tmp_path).records == 2
        answers.said = [{"id": 2, "at": "B"}, {"id": 1, "at": "C"}]
        assert run(service, tmp_path).records == 3
        answers.said = [{"id": 1, "at": "A"}]
        assert run(service, tmp_path).records == 4
    assert [row["at"] for row in values(tmp_path)] == ["A", "B", "C", "A"]


def test_with_an_id_a_row_that_has_changed_is_the_same(tmp_path):
    answers = Answers([{"id": 1, "age": 1}, {"id": 2, "age": 1}, {"age": 1}])
    with http_service.serving(answers) as service:
        run(service, tmp_path, id="id")
        answers.said = [{"id": 1, "age": 2}, {"id": 3, "age": 1}, {"age": 2}]
        run(service, tmp_path, id="id")
    assert [row.get("id") for row in values(tmp_path)] == [1, 2, None, 3, None]


ROUNDS = st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=5)


@settings(max_examples=some(25))  # each writes a log
@given(ROUNDS, st.integers(1, 3), st.sampled_from(["number", "time", "text"]), st.booleans())
def test_by_a_cursor_each_row_is_taken_once_whatever_pages_and_ties_there_are(
    tmp_path_factory, rounds, page_size, kind, inclusive
):
    """In each round rows are added, whose cursor is some steps after the last one's, and asked for from the last cursor on."""
    log = tmp_path_factory.mktemp("log")
    rows, at = [], 0
    make = {
        "number": lambda n: n,
        "time": lambda n: f"2026-01-01T00:00:{n // 2:02d}{'.5' if n % 2 else ''}Z",
        "text": lambda n: f"k{n:04d}",
    }[kind]
    place = {make(n): n for n in range(100)}

    def answer(asked, _number):
        query = parse_qs(urlsplit(asked.target).query)
        first = query.get("from", [None])[0]
        begin = -1 if first is None else place[int(first) if kind == "number" else first]
        kept = [row for row in rows if place[row["c"]] >= begin + (not inclusive)]
        page = int(query.get("page", ["0"])[0])
        shown = kept[page * page_size : (page + 1) * page_size]
        more = (page + 1) * page_size < len(kept)
        return 200, {"items": shown, "page": page + 1 if more else None}

    options = {
        "rows": "items",
        "cursor": "c",
        "since": "from",
        "next": "page",
        "next_param": "page",
    }
    with http_service.serving(answer) as service:
        for steps in rounds:
            for number, step in enumerate(steps):
                # A server that gives what is behind the cursor alone must not add to it later.
                at += max(step, 0 if inclusive or number else 1)
                rows.append({"c": make(at), "n": len(rows)})
            run(service, log, **options)
    assert values(log) == rows


def test_one_that_gives_few_rows_at_a_time_behind_the_cursor_is_asked_until_it_gives_none(tmp_path):
    rows = [{"c": n} for n in range(25)]

    def answer(asked, _number):
        begin = int(parse_qs(urlsplit(asked.target).query).get("from", ["-1"])[0])
        return 200, [row for row in rows if row["c"] > begin][:10]

    with http_service.serving(answer) as service:
        status = run(service, tmp_path, cursor="c", since="from", every="10 milliseconds")
    assert status.records == 25
    assert values(tmp_path) == rows


def test_an_order_that_would_lose_rows_stops_the_source(tmp_path):
    answers = Answers([{"c": 3}, {"c": 2}])
    with http_service.serving(answers) as service:
        with pytest.raises(ConfigError, match="not in the order of 'c': after 3 came 2"):
            run(service, tmp_path, cursor="c")
        answers.said = [{"c": 2}, {"c": 3}]
        run(service, tmp_path, cursor="c")
        answers.said = [{"c": 1}, {"c": 2}, {"c": 3}, {"c": 9}, {"c": 8}]
        with pytest.raises(ConfigError, match="after 9 came 8"):
            run(service, tmp_path, cursor="c")
        answers.said = [{"c": 1}, {"c": 2}, {"c": 3}, {"c": 8}, {"c": 9}]
        run(service, tmp_path, cursor="c")
    assert [row["c"] for row in values(tmp_path)] == [2, 3, 8, 9]


def test_a_row_without_its_cursor_or_key_is_a_dead_letter_once(tmp_path):
    answers = Answers(
        [{"c": 1, "k": "a"}, {"k": "b"}, {"c": "x", "k": "c"}, 7, {"c": 2}, {"c": 3, "k": "d"}]
    )
    with http_service.serving(answers) as service:
        for _ in range(3):
            status = run(service, tmp_path, cursor="c", key="k")
            assert (status.records, status.dead) == (2, 4)
        answers.said = [*answers.said, {"c": None}]
        assert run(service, tmp_path, cursor="c", key="k").dead == 5
    reasons = [letter["reason"] for letter in dead(tmp_path)]
    assert reasons[0].startswith("its cursor is None")
    assert reasons[1] == "its cursor 'c' is 'x', and that of rows before was 1"
    assert reasons[3].startswith("the key is the field 'k', and it is None")
    assert dead(tmp_path)[0]["where"].endswith("/, page 1, row 2")


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({"cursor": "changed"}, {"cursor": "made"}),
        ({"cursor": "changed"}, {}),
        ({}, {"id": "n"}),
    ],
)
def test_rows_that_are_told_apart_otherwise_than_before_are_refused(tmp_path, was, now):
    answers = Answers([{"n": 1, "made": 1, "changed": 7}])
    with http_service.serving(answers) as service:
        assert (
            run(service, tmp_path, cursor="chnged").dead == 1
        )  # no row was taken: that may be corrected
        run(service, tmp_path, **was)
        answers.said = [{"n": 1, "made": 1, "changed": 7}, {"n": 2, "made": 2, "changed": 8}]
        with pytest.raises(ConflictError, match="has taken rows with"):
            run(service, tmp_path, **now)
        assert run(service, tmp_path, **was).records == 2


def test_a_cursor_is_of_any_size_and_what_cannot_be_asked_for_is_none(tmp_path):
    body = b'[{"c": 1}, {"c": "half \\ud800"}, {"c": %s}]' % (b"9" * 400)
    with http_service.serving(lambda _asked, _number: (200, body)) as service:
        statuses = [run(service, tmp_path, cursor="c", since="s", every="100 ms") for _ in range(2)]
    assert [(status.records, status.dead) for status in statuses] == [(2, 1), (2, 1)]
    assert "half of a surrogate pair" in dead(tmp_path)[0]["reason"]


def test_more_rows_than_can_be_remembered_are_refused(tmp_path):
    answers = Answers([{"n": n} for n in range(10_001)])
    with http_service.serving(answers) as service:
        with pytest.raises(ConfigError, match="more than 10,000 rows, and which were taken"):
            run(service, tmp_path)
        answers.said = [row | {"c": 1} for row in answers.said]
        with pytest.raises(ConfigError, match="have one and the same value"):
            run(service, tmp_path, cursor="c")


def test_a_killed_process_leaves_each_row_once(tmp_path):
    """Rows by a cursor in pages, of which each has ties with the next one; killed with its log."""
    rows = [{"c": n // 7, "n": n} for n in range(2_000)]

    def answer(asked, _number):
        first = int(parse_qs(urlsplit(asked.target).query).get("from", ["0"])[0])
        kept = rows[first * 7 : first * 7 + 40]
        more = first * 7 + 40 < len(rows)
        return 200, {"data": kept, "from": kept[-1]["c"] if more else None}

    program = (
        "import millstream as ms, sys\n"
        "made = ms.http_poll(sys.argv[1], rows='data', cursor='c', since='from', next='from', next_param='from')\n"
        "ms.source(made, topic='events', to=sys.argv[2]).run(until='caught-up', on_status=lambda s: print(s.records, flush=True))\n"
    )
    with http_service.serving(answer) as service:
        for killed_after in (1, 4, 15, None):
            command = [sys.executable, "-c", program, service.url, tmp_path]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                for count, _ in enumerate(process.stdout, 1):
                    if count == killed_after:
                        process.kill()
                        break
                process.wait(300)
    assert process.returncode == 0
    assert values(tmp_path) == rows


# ── pages ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "link",
    [
        '<{}>; rel="next"',
        "<{}>; rel=next",
        '</x>; rel="prev", <{}>; title="a, b"; rel="last next"',
    ],
)
def test_pages_are_followed_by_the_header_link(tmp_path, link):
    def answer(asked, _number):
        page = int(parse_qs(urlsplit(asked.target).query).get("page", ["1"])[0])
        headers = {"Link": link.format(f"/items?page={page + 1}")} if page < 3 else {}
        return 200, [{"page": page}], headers

    with http_service.serving(answer) as service:
        run(service, tmp_path, "/items")
        assert service.targets == ["/items", "/items?page=2", "/items?page=3"]
    assert values(tmp_path) == [{"page": 1}, {"page": 2}, {"page": 3}]


def test_a_page_of_another_server_does_not_get_the_headers(tmp_path):
    with http_service.serving(Answers([])) as other:

        def answer(_asked, _number):
            return 200, [{"a": 1}], {"Link": f'<{other.url}/>; rel="next"'}

        with (
            http_service.serving(answer) as service,
            pytest.raises(ConfigError, match="leads to a page on another server"),
        ):
            run(service, tmp_path, headers={"X-Key": "secret"})
        assert other.asked == []


def test_pages_that_lead_to_themselves_are_refused(tmp_path):
    with (
        http_service.serving(Answers({"items": [], "next": "?page=2"})) as service,
        pytest.raises(ConfigError, match="have no end"),
    ):
        run(service, tmp_path, rows="items", next="next")


# ── what a server answers ───────────────────────────────────────────────────────────────────


def test_a_server_is_asked_whether_anything_has_changed(tmp_path):
    """The second round is answered without a body; the third one has new rows."""
    asked_with = []
    over = []

    def answer(asked, number):
        asked_with.append(asked.headers.get("If-None-Match"))
        if number == 2:
            return 304, b""
        if number >= 3:
            over.append(number)
        return 200, [{"n": min(number, 3)}], {"ETag": f'"{min(number, 3)}"'}

    with http_service.serving(answer) as service:
        made = source(ms.http_poll(service.url, every="1ms"), tmp_path)

        def look(status):
            if status.records == 2:
                made.stop()

        made.run(on_status=look)
    assert asked_with[:3] == [None, '"1"', '"1"']
    assert values(tmp_path) == [{"n": 1}, {"n": 3}]


def test_a_server_that_asks_for_patience_is_not_asked_before(tmp_path):
    times = []

    def answer(_asked, number):
        times.append(time.monotonic())
        return (429, b"", {"Retry-After": "1"}) if number == 1 else (200, [{"n": 1}])

    statuses = []
    with http_service.serving(answer) as service:
        connector = ms.http_poll(service.url)
        source(connector, tmp_path).run(until="caught-up", on_status=statuses.append)
    assert times[1] - times[0] >= 1
    assert statuses[0].state == "retrying"
    assert statuses[0].problem == f"GET {service.url} responded 429. It is tried again."
    assert values(tmp_path) == [{"n": 1}]


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ((404, b""), ConfigError, "responded 404. Correct the address"),
        ((401, b""), ConfigError, "responded 401"),
        ((302, b"", {"Location": "http://127.0.0.1:1/"}), ConfigError, "another server"),
        ((503, b""), RetriableError, "responded 503"),
        ((200, b"<html>"), RetriableError, "with what is no JSON"),
        ((200, b"\xff"), RetriableError, "with what is no JSON"),
        ((200, b"[" * 100_000), RetriableError, "with what is no JSON"),
        ((200, {"error": "x"}), ConfigError, "has no rows at 'data', but the names 'error'"),
        ((200, [1]), ConfigError, "has no rows at 'data', but a list"),
        ((200, {"data": 5}), ConfigError, "has no rows at 'data'"),
        ((200, {"data": [], "next": [1]}), ConfigError, r"the next page is \[1\]"),
    ],
)
def test_answers_without_rows_say_what_is_to_be_done(answer, kind, said):
    with http_service.serving(lambda *_: answer) as service:
        reader = ms.http_poll(f"{service.url}/x?key=secret", rows="data", next="next").open({})
        with pytest.raises(kind, match=said) as raised:
            reader.read(0.1)
        assert "secret" not in str(raised.value)


def test_a_secret_is_a_header(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_SOURCE_AUTHORIZATION", "Bearer one")
    monkeypatch.setenv("API_KEY", "two")
    with http_service.serving(Answers([])) as service:
        run(service, tmp_path, headers={"X-Key": "${env:API_KEY}"})
        sent = service.asked[0].headers
    assert (sent["Authorization"], sent["X-Key"]) == ("Bearer one", "two")


# ── the text of rows ────────────────────────────────────────────────────────────────────────

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(JSON_VALUES, max_size=5), JSON_VALUES, st.sampled_from([None, 0, 2]), st.booleans())
def test_rows_have_the_text_that_they_have_in_the_document(rows, beside, indent, ascii_only):
    document = {"beside": beside, "data": {"more": beside, "items": rows}, "after": beside}
    body = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    )
    try:
        body.decode()
    except UnicodeDecodeError:
        return
    found = list(JsonPage(body, "GET x").rows("data.items"))
    assert [row.event for row in found] == rows
    assert [json.loads(row.text) for row in found] == rows
    assert all(row.text in body.decode() for row in found)


def test_numbers_keep_their_digits_and_what_is_no_json_is_a_dead_letter(tmp_path):
    body = (
        b' { "data" : [ {"x": 0.10000000000000000001}\n, {"x": NaN}, {"x": 1e999}] , "data2": 1 } '
    )
    with http_service.serving(lambda *_: (200, body)) as service:
        status = run(service, tmp_path, rows="data")
    assert (status.records, status.dead) == (2, 1)
    assert raw(tmp_path) == [b'{"x": 0.10000000000000000001}', b'{"x": 1e999}']
    assert dead(tmp_path)[0]["reason"] == "NaN is no JSON"


# ── options ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("ftp://host", {}, "is no URL of HTTP"),
        ("http://", {}, "is no URL of HTTP"),
        ("http://host/#x", {}, "is no URL of HTTP"),
        ("http://u:secret@host/", {}, "a user or a password in it"),
        ("http://host", {"since": "a"}, "give cursor= and since="),
        ("http://host", {"cursor": "a", "start": "1"}, "give cursor= and since="),
        ("http://host", {"next_param": "a"}, "give next="),
        ("http://host", {"timeout_s": 0}, "timeout_s is 0"),
        ("http://host", {"every": "soon"}, "every"),
        ("http://host", {"headers": {"Host": "x"}}, "'Host' cannot be sent"),
        ("http://host", {"headers": {"X": "a\nb"}}, "'X' cannot be sent"),
        ("http://host", {"headers": {"X": "${env:NOT_THERE_AT_ALL}"}}, "NOT_THERE_AT_ALL"),
    ],
)
def test_options_that_are_not_possible_are_refused(url, options, said):
    with pytest.raises(ConfigError, match=said) as raised:
        ms.http_poll(url, **options)
    assert "secret" not in str(raised.value)


def test_the_command_takes_options_beside_the_address(tmp_path, capsys):
    with http_service.serving(Answers({"data": [{"id": 1}]})) as service:
        command = ["source", f"{service.url}/a?b=c", "--topic", "events", "--to", str(tmp_path)]
        options = ["-o", "rows=data", "-o", "key=id", "--until", "caught-up"]
        assert run_command([*command, *options]) == 0
        assert service.targets == ["/a?b=c"]
    assert values(tmp_path) == [{"id": 1}]
    assert "1 records" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="Did you mean 'cursor'"):
        connector_of("http://host", {"cursr": "a"})
    with pytest.raises(ConfigError, match="timeout_s is 'x'"):
        connector_of("http://host", {"timeout_s": "x"})
