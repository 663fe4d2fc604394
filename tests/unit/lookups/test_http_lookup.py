"""Lookups by HTTP: what is asked, how answers are read, and what a service can do to a job."""

import contextlib
import json
import pickle
import socket
import time
from datetime import UTC, date, datetime
from decimal import Decimal

import polars as pl
import pytest
from broker.certificates import made
from http_service import raw_serving, serving

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.definition import canonical_text, describe
from millstream.kernels.enrichment.calls import LookupCallError
from millstream.lookups import http_client

KEY = (("user", pl.String()),)
COUNTRY = (("country", pl.String()),)
SECRET = "s3cr3t-token"


def ask(lookup, users=("u1",), key=KEY, answer=COUNTRY, timeout_s=5.0):
    keys = users if isinstance(users, pl.DataFrame) else pl.DataFrame({"user": list(users)})
    return lookup.bound(key, answer, timeout_s)(keys)


def failure(lookup, users=("u1",), **options):
    with pytest.raises(LookupCallError) as failed:
        ask(lookup, users, **options)
    return failed.value


def test_a_get_asks_for_one_key_and_reads_columns_by_their_paths():
    with serving(lambda *_: (200, {"data": {"address": {"country": "CH"}, "age": 7}})) as service:
        lookup = ms.http_lookup(
            service.url + "/users/{user}?full=1",
            answer="data",
            fields={"country": "address.country"},
        )
        found = ask(lookup, answer=(*COUNTRY, ("age", pl.Int8()), ("gone", pl.Date())))
        assert found.rows() == [("u1", "CH", 7, None)]
        assert found.schema == {
            "user": pl.String,
            "country": pl.String,
            "age": pl.Int8,
            "gone": pl.Date,
        }
        assert service.targets == ["/users/u1?full=1"]


@pytest.mark.parametrize("status", [404, 204])
def test_a_key_that_the_service_does_not_know_has_no_row(status):
    with serving(lambda *_: (status, b"")) as service:
        assert ask(ms.http_lookup(service.url + "/{user}")).rows() == []


def test_a_post_asks_for_many_keys_by_one_request():
    def answer(asked, _):
        return 200, [{**key, "country": key["user"].upper()} for key in asked.json()[:2]]

    with serving(answer) as service:
        lookup = ms.http_lookup(service.url + "/users", method="POST")
        assert ask(lookup, ["a", "b", "c"]).rows() == [("a", "A"), ("b", "B")]
        (asked,) = service.asked
        assert asked.json() == [{"user": "a"}, {"user": "b"}, {"user": "c"}]
        assert asked.headers["content-type"] == "application/json"


def test_keys_of_all_types_are_answered_as_they_were_asked():
    keys = pl.DataFrame(
        {
            "n": [7],
            "b": [True],
            "d": [date(2026, 1, 2)],
            "t": [datetime(2026, 1, 2, 3, tzinfo=UTC)],
            "m": [Decimal("1.50")],
        },
        schema={
            "n": pl.UInt8,
            "b": pl.Boolean,
            "d": pl.Date,
            "t": pl.Datetime("ms", "UTC"),
            "m": pl.Decimal(9, 2),
        },
    )
    key = tuple(keys.schema.items())
    with serving(lambda asked, _: (200, [{**asked.json()[0], "country": "X"}])) as service:
        posted = ask(ms.http_lookup(service.url, method="POST"), keys, key=key)
        assert posted.select(keys.columns).equals(keys)
    with serving(lambda *_: (200, {"country": "X"})) as service:
        got = ask(ms.http_lookup(service.url + "/{n}/{b}/{d}/{t}?m={m}"), keys, key=key)
        assert got.select(keys.columns).equals(keys)
        assert service.targets == ["/7/true/2026-01-02/2026-01-02T03%3A00%3A00%2B00%3A00?m=1.50"]


@pytest.mark.parametrize(
    ("value", "target"),
    [
        ("a/b?c#d%2e&e=f", "/users/a%2Fb%3Fc%23d%252e%26e%3Df/x?u=a%2Fb%3Fc%23d%252e%26e%3Df"),
        (
            "ü \r\nHost: evil",
            "/users/%C3%BC%20%0D%0AHost%3A%20evil/x?u=%C3%BC%20%0D%0AHost%3A%20evil",
        ),
        ("//evil.org", "/users/%2F%2Fevil.org/x?u=%2F%2Fevil.org"),
        ("@evil.org", "/users/%40evil.org/x?u=%40evil.org"),
        ("...", "/users/.../x?u=..."),
    ],
)
def test_a_key_is_a_value_in_the_address_and_nothing_else(value, target):
    with serving(lambda *_: (200, {"country": "CH"})) as service:
        ask(ms.http_lookup(service.url + "/users/{user}/x?u={user}"), [value])
        assert service.targets == [target]


@pytest.mark.parametrize(
    "value", ["..", ".", "", "../../admin", "a/../b", "a\\..\\b", "./x", "x/.."]
)
def test_a_key_that_would_be_another_path_is_never_asked(value):
    with serving(lambda *_: (200, {"country": "CH"})) as service:
        failed = failure(ms.http_lookup(service.url + "/users/{user}"), [value])
        assert not failed.retriable
        assert service.asked == []
        assert ask(ms.http_lookup(service.url + "/users?u={user}"), [value]).height == 1


@pytest.mark.parametrize(
    ("url", "options", "error"),
    [
        ("ftp://x/{user}", {}, "must begin with http"),
        ("http://{user}/x", {}, "whom it asks"),
        ("http://api.{user}.org/x", {}, "whom it asks"),
        ("http://api:{user}/x", {}, "whom it asks"),
        ("http://me:pass@api/{user}", {}, "as a header"),
        ("http://api/{user}#x", {}, "a #"),
        ("http://api/a b/{user}", {}, "%20"),
        ("http://api/{user", {}, "bracket"),
        ("http://api/{user!r}", {}, "just a name"),
        ("http://api/{}", {}, "just a name"),
        ("http://api:99999/{user}", {}, "no URL"),
        ("http://api/{usr}", {}, "Did you mean 'user'"),
        ("http://api/", {}, "does not have {user}"),
        ("http://api/{user}", {"method": "POST"}, 'method="GET"'),
        ("http://api/{user}", {"method": "PUT"}, "Choose"),
        ("http://api/{user}", {"headers": {"X": "a\nb"}}, "line break"),
        ("http://api/{user}", {"headers": {"Host": "b"}}, "not allowed"),
        ("http://api/{user}", {"headers": "x"}, "of type str"),
        ("http://api/{user}", {"secrets": {"user": "b"}}, "Rename the secret"),
        ("http://api/{user}", {"secrets": {"t": ""}}, "empty"),
        ("http://api/{user}", {"fields": {"contry": "a"}}, "Did you mean 'country'"),
        ("http://api/{user}", {"fields": {"country": "a..b"}}, "dots between"),
        ("http://api/{user}", {"unknown": [200]}, "400 to 499"),
        ("http://api/{user}", {"response_bytes_max": 0}, "number of bytes"),
        (7, {}, "Give a text"),
    ],
)
def test_what_cannot_be_asked_is_refused_where_it_is_declared(url, options, error):
    with pytest.raises(ConfigError, match=error) as refused:
        ms.http_lookup(url, **options).bound(KEY, COUNTRY, 1.0)
    assert "pass" not in str(refused.value).replace("password", "")


def test_keys_and_answers_of_types_that_json_has_not_are_refused():
    lookup = ms.http_lookup("http://api/{user}")
    for key, answer in [
        (pl.Float64(), pl.String()),
        (pl.Binary(), pl.String()),
        (pl.Datetime("ns"), pl.String()),
        (pl.UInt64(), pl.String()),
        (pl.String(), pl.UInt64()),
        (pl.String(), pl.Categorical()),
    ]:
        with pytest.raises(ConfigError, match=r"pl\.String"):
            lookup.bound((("user", key),), (("country", answer),), 1.0)


def app_of(lookup, **options):
    app = ms.App("a", log="unused")
    stream = app.topic("rows", {"user": str, "n": int}, partitions=1).stream()
    stream.enrich(lookup, on="user", schema={"country": pl.String}, **options).view("out", key="n")
    return app


def test_a_stream_is_enriched_and_a_get_asks_for_one_key():
    def answer(asked, _):
        user = asked.target.rsplit("/", 1)[1]
        return (404, b"") if user == "u3" else (200, {"country": user.upper()})

    rows = [{"user": f"u{n % 5}", "n": n} for n in range(20)]
    with serving(answer) as service:
        app = app_of(ms.http_lookup(service.url + "/users/{user}"))
        found = testing.run(app, {"rows": rows}, batches=3, crash=2)["out"].sort("n")
        assert found["country"].to_list() == [
            None if n % 5 == 3 else f"U{n % 5}" for n in range(20)
        ]
        assert sorted(service.targets) == [f"/users/u{n}" for n in range(5)]
    with pytest.raises(ConfigError, match='method="POST"'):
        app_of(ms.http_lookup("http://api/{user}"), batch_rows=5)


def test_statuses_are_answers_failures_that_may_pass_and_failures_for_good():
    for status, retriable in [(408, True), (425, True), (429, True), (500, True), (503, True)]:
        with serving(lambda *_, s=status: (s, b"gone")) as service:
            failed = failure(ms.http_lookup(service.url + "/{user}"))
            assert (failed.retriable, str(failed)) == (
                retriable,
                f"GET {service.url}/{{user}} responded {status}",
            )
    for status in (400, 401, 403, 404, 410):
        with serving(lambda *_, s=status: (s, b"no")) as service:
            assert not failure(ms.http_lookup(service.url + "/{user}", unknown=[])).retriable


def test_the_service_says_when_to_come_back():
    for given, expected_s in [("7", 7), ("x", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)]:
        with serving(lambda *_, text=given: (429, b"", {"Retry-After": text})) as service:
            assert failure(ms.http_lookup(service.url + "/{user}")).retry_after_s == expected_s


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>", "not JSON"),
        (b"", "not JSON"),
        (b"[1]", "not an object"),
        (b'{"country": 7}', "not text"),
        (b'{"country": "a", "country": "b"}', "given twice"),
        (b'"\xff"', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_body_that_does_not_fit_is_a_failed_call(body, reason):
    with serving(lambda *_: (200, body)) as service:
        failed = failure(ms.http_lookup(service.url + "/{user}"))
        assert failed.retriable
        assert reason in str(failed)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([{"user": "a"}, {"user": "a"}], "two answers"),
        ([{"user": "z"}], "not asked for"),
        ({"user": "a"}, "no list"),
        ([["a"]], "not an object"),
        ([{"country": "CH"}], "not asked for"),
    ],
)
def test_a_post_whose_answers_are_not_those_of_the_keys_has_failed(answers, reason):
    with serving(lambda *_: (200, answers)) as service:
        failed = failure(ms.http_lookup(service.url, method="POST"), ["a", "b"])
        assert reason in str(failed)


def test_decimals_are_written_out_and_the_hour_that_clocks_repeat_has_two_keys():
    small = pl.DataFrame({"m": [Decimal("0.0000001")]}, schema={"m": pl.Decimal(20, 10)})
    with serving(lambda *_: (200, {"country": "X"})) as service:
        ask(ms.http_lookup(service.url + "/{m}"), small, key=tuple(small.schema.items()))
        assert service.targets == ["/0.0000001000"]
    utc = [datetime(2026, 10, 25, hour, 30, tzinfo=UTC) for hour in (0, 1)]
    times = pl.DataFrame({"t": utc}).select(pl.col("t").dt.convert_time_zone("Europe/Zurich"))

    def numbered(asked, _):
        return 200, [{**key, "country": str(n)} for n, key in enumerate(asked.json())]

    with serving(numbered) as service:
        lookup = ms.http_lookup(service.url, method="POST")
        found = ask(lookup, times, key=tuple(times.schema.items()))
        assert found["t"].equals(times["t"])
        assert found["country"].to_list() == ["0", "1"]


@pytest.mark.parametrize(("a", "b"), [("x/", ".."), ("x\\", "."), ("..", "/x"), (".", ".")])
def test_two_values_side_by_side_are_no_other_path(a, b):
    keys = pl.DataFrame({"a": [a], "b": [b]})
    with serving(lambda *_: (200, {"country": "CH"})) as service:
        lookup = ms.http_lookup(service.url + "/users/{a}{b}")
        assert not failure(lookup, keys, key=tuple(keys.schema.items())).retriable
        assert service.asked == []


@pytest.mark.parametrize("body", [[], "busy", 5, [{"data": {}}]])
def test_a_body_without_names_is_no_missing_answer(body):
    with serving(lambda *_: (200, body)) as service:
        failed = failure(ms.http_lookup(service.url + "/{user}", answer="data"))
        assert "no object" in str(failed)
    with serving(lambda *_: (200, {"data": None})) as service:
        assert ask(ms.http_lookup(service.url + "/{user}", answer="data.user")).rows() == []


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (pl.List(pl.Decimal(10, 2)), ["1.234"]),
        (pl.Struct({"m": pl.Decimal(10, 2)}), {"m": "1.234"}),
        (pl.Decimal(4, 2), "123.00"),
        (pl.Float32(), 1e300),
        (pl.List(pl.Float32()), [-1e300]),
    ],
    ids=str,
)
def test_no_value_is_cut_to_fit(dtype, value):
    with serving(lambda *_: (200, {"country": value})) as service:
        lookup = ms.http_lookup(service.url + "/{user}")
        failure(lookup, answer=(("country", dtype),))


def test_decimals_of_many_digits_are_kept():
    value = Decimal("12345678901234567890.1234567890")
    with serving(lambda *_: (200, {"country": str(value)})) as service:
        lookup = ms.http_lookup(service.url + "/{user}")
        found = ask(lookup, answer=(("country", pl.Decimal(38, 10)),))
        assert found["country"].to_list() == [value]


def test_a_key_of_null_is_not_the_text_none():
    with serving(lambda *_: (200, [{"user": None, "country": "X"}])) as service:
        failed = failure(ms.http_lookup(service.url, method="POST"), ["None"])
        assert "not asked for" in str(failed)


def test_a_number_that_does_not_fit_its_column_is_a_failed_call():
    with serving(lambda *_: (200, {"country": 300})) as service:
        failed = failure(ms.http_lookup(service.url + "/{user}"), answer=(("country", pl.Int8()),))
        assert "does not fit into Int8" in str(failed)


def test_a_body_that_is_too_large_is_not_read():
    sent = []

    def talk(connection):
        connection.recv(10_000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        for _ in range(3200):  # 200 MB
            connection.sendall(chunk)
            sent.append(1)

    with raw_serving(talk) as url:
        failed = failure(ms.http_lookup(url + "/{user}", response_bytes_max=100_000))
        assert (failed.retriable, "more than 100,000 bytes" in str(failed)) == (False, True)
    assert len(sent) < 1000
    with serving(lambda *_: (200, b"x" * 101)) as service:
        lookup = ms.http_lookup(service.url + "/{user}", response_bytes_max=100)
        assert "more than 100 bytes" in str(failure(lookup))


def test_a_compressed_body_is_refused():
    with serving(lambda *_: (200, b"x", {"Content-Encoding": "gzip"})) as service:
        assert "compressed" in str(failure(ms.http_lookup(service.url + "/{user}")))


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n"


def hold(connection):
    with contextlib.suppress(OSError):
        connection.settimeout(5)
        connection.recv(1000)  # until the other side is done


@pytest.mark.parametrize("begins", [b"", b"HTTP/1.1 2", HEAD, HEAD + b'{"coun'])
def test_a_peer_that_says_no_more_is_not_waited_for(begins):
    def talk(connection):
        connection.recv(10_000)
        connection.sendall(begins)
        hold(connection)

    with raw_serving(talk) as url:
        started_s = time.monotonic()
        failed = failure(ms.http_lookup(url + "/{user}"), timeout_s=0.1)
        assert (failed.retriable, "in time" in str(failed)) == (True, True)
        assert time.monotonic() - started_s < 3


def test_a_peer_that_sends_a_byte_now_and_then_does_not_hold_a_call_for_ever():
    def talk(connection):
        connection.recv(10_000)
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1000:
            connection.sendall(bytes([byte]))
            time.sleep(0.01)

    with raw_serving(talk) as url:
        started_s = time.monotonic()
        assert "in time" in str(failure(ms.http_lookup(url + "/{user}"), timeout_s=0.2))
        assert time.monotonic() - started_s < 3


def test_a_peer_that_answers_half_a_message_and_leaves_has_failed():
    def talk(connection):
        connection.recv(10_000)
        connection.sendall(HEAD + b'{"country"')

    with raw_serving(talk) as url:
        failed = failure(ms.http_lookup(url + "/{user}"))
        assert (failed.retriable, "less of the body" in str(failed)) == (True, True)


def test_a_second_response_to_one_request_is_not_taken_for_the_next_ones():
    def talk(connection):
        connection.settimeout(2)
        while asked := connection.recv(10_000):
            user = asked.split()[1][1:].decode()
            body = json.dumps({"country": user}).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(head + body)
            time.sleep(0.05)
            connection.sendall(head + body)

    with raw_serving(talk) as url:
        lookup = ms.http_lookup(url + "/{user}").bound(KEY, COUNTRY, 5.0)
        for user in "abc":
            assert lookup(pl.DataFrame({"user": [user]})).rows() == [(user, user)]
            time.sleep(0.1)


def test_what_follows_an_early_response_is_not_taken_for_the_next_ones():
    """A server may send 103 before its response: that comes when the next request was sent."""

    def talk(connection):
        asked = connection.recv(65536)
        if not asked:
            return
        user = asked.split(b" ", 2)[1]
        connection.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        connection.settimeout(2)
        with contextlib.suppress(TimeoutError):
            connection.recv(65536)
        body = b'{"country": "of %s"}' % user
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with raw_serving(talk) as url:
        lookup = ms.http_lookup(url + "/{user}")
        for user in ("u1", "u2"):
            assert "responded 103" in str(failure(lookup, [user]))


def test_connections_are_kept_and_one_that_was_closed_is_made_again():
    closing = {"Connection": "close"}
    with serving(lambda _, n: (200, {"country": "x"}, closing if n == 3 else {})) as service:
        lookup = ms.http_lookup(service.url + "/{user}")
        for _ in range(5):
            ask(lookup)
        assert len({asked.peer for asked in service.asked}) == 2

    served = []

    def talk(connection):  # answers once, and leaves without a word
        served.append(connection.recv(10_000))
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with raw_serving(talk) as url:
        for _ in range(3):
            assert ask(ms.http_lookup(url + "/{user}")).height == 1
    assert len([asked for asked in served if asked]) == 3


def test_nobody_listens():
    with serving(lambda *_: (200, {})) as service:
        url = service.url
    failed = failure(ms.http_lookup(url + "/{user}"))
    assert (failed.retriable, "cannot be reached: Connection refused" in str(failed)) == (
        True,
        True,
    )


def test_https_asks_only_a_server_that_is_trusted_and_has_the_name(tmp_path, monkeypatch):
    certificate = made(tmp_path)  # for localhost and 127.0.0.1
    with serving(lambda *_: (200, {"country": "CH"}), certificate) as service:
        lookup = ms.http_lookup(service.url + "/{user}")
        http_client._tls.cache_clear()
        assert "self-signed certificate" in str(failure(lookup))
        assert service.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.cert))
        http_client._tls.cache_clear()
        assert ask(lookup).rows() == [("u1", "CH")]
        monkeypatch.setattr(
            socket, "create_connection", lambda address, *_: _connect(service, address)
        )
        other = ms.http_lookup(service.url.replace("localhost", "other.example") + "/{user}")
        assert "not valid for 'other.example'" in str(failure(other))
    http_client._tls.cache_clear()


def _connect(service, _address):
    connection = socket.socket()
    connection.connect(service.server.server_address)
    return connection


def test_redirects_stay_on_the_server_and_no_other_gets_the_headers():
    with serving(lambda *_: (200, {"country": "evil"})) as other:

        def answer(asked, _):
            if asked.target.startswith("/old/"):
                return 301, b"", {"Location": asked.target.replace("/old/", "/new/")}
            if asked.target.startswith("/loop/"):
                return 302, b"", {"Location": asked.target}
            if asked.target.startswith("/out/"):
                return 307, b"", {"Location": f"{other.url}/steal?{SECRET}"}
            if asked.target.startswith("/bad/"):
                return 302, b"", {"Location": "http://[/"}
            return 200, {"country": asked.headers["authorization"]}

        headers = {"Authorization": SECRET}
        with serving(answer) as service:
            moved = ms.http_lookup(service.url + "/old/{user}", headers=headers)
            assert ask(moved)["country"].to_list() == [SECRET]
            for path, reason in [("loop", "more than 5"), ("out", "another"), ("bad", "without")]:
                failed = failure(ms.http_lookup(f"{service.url}/{path}/{{user}}", headers=headers))
                assert (failed.retriable, reason in str(failed)) == (False, True)
                assert SECRET not in str(failed)
        assert other.asked == []


def test_secrets_are_sent_and_are_in_no_text_and_no_definition():
    with serving(lambda *_: (503, b"")) as service:
        url = service.url + "/{user}?key={token}"
        lookup = ms.http_lookup(
            url, headers={"Authorization": SECRET}, secrets={"token": SECRET + "&x"}
        )
        failed = failure(lookup)
        (asked,) = service.asked
        assert asked.headers["authorization"] == SECRET
        assert asked.target == f"/u1?key={SECRET}%26x"
    bound = lookup.bound(KEY, COUNTRY, 1.0)
    kernel = app_of(lookup)
    texts = [str(failed), repr(failed), repr(lookup), repr(bound), repr(kernel)]
    texts.append(canonical_text(describe(bound)))
    assert not any(SECRET in text for text in texts)
    other = ms.http_lookup(url, headers=dict, secrets={"token": "another"})
    assert describe(other.bound(KEY, COUNTRY, 9.0)) == describe(bound)
    changed = ms.http_lookup(url + "&v=2", secrets={"token": "x"})
    assert describe(changed.bound(KEY, COUNTRY, 1.0)) != describe(bound)


def kernel_of(lookup, **options):
    stream = ms.App("a", log="unused").topic("rows", {"user": str}).stream()
    return stream.enrich(lookup, on="user", schema={"country": pl.String}, **options).node.kernel


def test_the_journal_of_another_address_is_not_read_and_that_of_another_secret_is():
    def code(url, token):
        return kernel_of(ms.http_lookup(url, headers={"Authorization": token})).code

    assert code("http://a/{user}", "1") == code("http://a/{user}", "2")
    assert code("http://a/{user}", "1") != code("http://b/{user}", "1")


def test_how_a_lookup_is_called_is_that_of_the_step():
    policy = kernel_of(
        ms.http_lookup("http://a/{user}"), timeout="2 seconds", retries=1, concurrency=3
    ).policy
    assert (policy.batch_rows, policy.timeout_s, policy.retries, policy.concurrency) == (1, 2, 1, 3)
    assert kernel_of(ms.http_lookup("http://a", method="POST")).policy.batch_rows == 1000
    with pytest.raises(ConfigError, match="concurrency"):
        kernel_of(ms.http_lookup("http://a/{user}"), concurrency=0)
    with pytest.raises(ConfigError, match=r"ms\.http_lookup"):
        kernel_of("http://a/{user}")


def test_a_function_of_headers_is_called_for_each_request_and_its_failures_say_no_secret():
    tokens = iter([{"Authorization": "1"}, {"Authorization": "2"}])
    with serving(lambda asked, _: (200, {"country": asked.headers["authorization"]})) as service:
        lookup = ms.http_lookup(service.url + "/{user}", headers=lambda: next(tokens))
        assert [ask(lookup)["country"][0] for _ in range(2)] == ["1", "2"]

        def broken():
            raise RuntimeError(SECRET)

        for headers in (broken, lambda: {"Authorization": SECRET + "\n"}, lambda: SECRET):
            failed = failure(ms.http_lookup(service.url + "/{user}", headers=headers))
            assert SECRET not in str(failed)
        assert len(service.asked) == 2


def test_what_travels_has_no_connection():
    with serving(lambda *_: (200, {"country": "CH"})) as service:
        bound = ms.http_lookup(service.url + "/{user}").bound(KEY, COUNTRY, 5.0)
        keys = pl.DataFrame({"user": ["u1"]})
        assert bound(keys).equals(pickle.loads(pickle.dumps(bound))(keys))
        assert len({asked.peer for asked in service.asked}) == 1
