"""Who may ask the page's server for what: tokens, roles, log-ins, origins, TLS; and requests that mean harm."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from broker.certificates import made

import millstream as ms
from millstream import http as web
from millstream.access.audit_log import AuditLog
from millstream.access.tokens import TokenFile
from millstream.cli.ui import _replay
from millstream.edge.http.routes import EdgeRoutes
from millstream.errors import ConfigError
from millstream.http_access import AccessRoute
from millstream.http_sessions import SESSION_S, LoginSessions
from millstream.metrics.exposition import Exposition
from millstream.views.questions import server as question_server
from millstream.views.server.catalog import ViewCatalog
from millstream.views.server.routes import application
from millstream.views.server.server import serve

REPLAY = "/apps/ads/dead-letters/replay"
RECORDS = '{"records": ["ad-events/0/0"], "late_ok": true}'
JSON = {"Content-Type": "application/json"}


def row(minute):
    return (minute, 7, 10, 1, "0.50")


def ask(url, method, path, body=None, context=None, **headers):
    """Send one request as it is: the path is not corrected, redirections are not followed."""
    place = urlsplit(url)
    if place.scheme == "https":
        connection = http.client.HTTPSConnection(
            place.hostname, place.port, timeout=60, context=context
        )
    else:
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    with closing(connection):
        given = {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        text = answer.read().decode()
    found = dict(answer.getheaders())
    return SimpleNamespace(
        status=answer.status,
        headers={name.lower(): value for name, value in found.items()},
        text=text,
    )


@pytest.fixture
def door(ads, tmp_path):
    """A server with the tokens of a reader and of an operator, of an app that has a dead letter."""
    ads.commit(row(0), row(1), dead={0: "field 'cost' is missing"})
    path = tmp_path / "tokens"
    tokens = {role: TokenFile(path).add(f"{role}er", role) for role in ("read", "operate")}
    with serve(
        ads.log,
        listen="127.0.0.1:0",
        replay=partial(_replay, ads.log),
        token_file=path,
    ) as serving:
        url = serving.url.rstrip("/")
        yield SimpleNamespace(
            url=url,
            path=path,
            log=ads.log,
            ask=partial(ask, url),
            bearer={role: {"Authorization": f"Bearer {one}"} for role, one in tokens.items()},
            tokens=tokens,
        )


def cookie_of(door, role="operate"):
    body = json.dumps({"token": door.tokens[role]})
    answer = door.ask("POST", "/login", body, Origin=door.url, **JSON)
    assert answer.status == 200, answer
    return answer.headers["set-cookie"]


# -- roles ----------------------------------------------------------------------------------------


def _applications(ads):
    """Return each of our applications over HTTP, by what it is of."""
    with closing(ViewCatalog(ads.log, ())) as catalog:
        page, _ = application(catalog, Exposition({}, []), hosts=None)
    edge = EdgeRoutes.__new__(EdgeRoutes)  # its routes are told by the class; nothing is served
    edge._exposition = Exposition({}, [])
    return {
        "page": page,
        "edge": edge.application(),
        "questions": question_server._application(None),
    }


def test_every_route_says_which_role_it_needs_and_what_changes_anything_needs_operate(ads):
    """A route that is added without a role, or that changes something for readers, fails here."""
    open_routes, posts = set(), {}
    for server, app in _applications(ads).items():
        for route in app.routes:
            assert isinstance(route, AccessRoute), f"{server}: {route} has no role"
            methods = route.methods - {"HEAD"}
            if route.role is None:
                open_routes |= {f"{server} {method} {route.path}" for method in methods}
            elif methods != {"GET"}:
                posts[f"{server} {route.path}"] = (route.role, route.changes)
    assert open_routes == {
        "page GET /login",
        "page POST /login",
        "page GET /assets/{name}",
        *(f"{server} GET /healthz" for server in ("page", "edge", "questions")),
        *(f"{server} GET /readyz" for server in ("page", "edge")),
    }
    assert posts == {
        "page /apps/{app}/dead-letters/replay": ("operate", True),
        "page /apps/{app}/versions/{action}": ("operate", True),
        "page /apps/{app}/partial-matches": ("read", True),  # it begins a process
        "page /logout": ("read", False),
        "edge /topics/{topic}": ("operate", False),
        "questions /ask/{name}": ("read", False),
    }


def test_without_a_token_only_the_form_and_the_probes_are_answered(door, ads):
    paths = sorted({route.path for route in _applications(ads)["page"].routes})
    for template in paths:
        path = template.replace("{app}", "ads").replace("{view}", "ad_ctr")
        path = path.replace("{name}", "style.css").replace("{action}", "plan")
        expected = path in ("/login", "/healthz", "/readyz", "/assets/style.css")
        for headers in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": "Basic eDp5"}):
            answer = door.ask("GET", path, **headers)
            assert (answer.status == 200) == expected, (path, answer)
            if not expected:
                assert answer.status == 401, (path, answer)
    assert door.ask("GET", "/no/such/thing").status == 401


def test_a_reader_reads_and_an_operator_changes_what_is_recorded_by_name(door):
    for role in ("read", "operate"):
        assert door.ask("GET", "/views", **door.bearer[role]).status == 200
    refused = door.ask("POST", REPLAY, RECORDS, **JSON, **door.bearer["read"])
    assert (refused.status, json.loads(refused.text)["error"]["kind"]) == (403, "RoleRefused")
    assert AuditLog(door.log, "ads").read() == []
    done = door.ask("POST", REPLAY, RECORDS, **JSON, **door.bearer["operate"])
    assert (done.status, json.loads(done.text)["records"]) == (200, 1)
    (entry,) = AuditLog(door.log, "ads").read()
    assert (entry.who.token, entry.who.client) == ("operateer", "127.0.0.1")
    assert (entry.what, entry.outcome, entry.details["appended"]) == ("dead replay", "done", 1)
    for token in door.tokens.values():
        assert token not in AuditLog(door.log, "ads").path.read_text()


def test_a_reader_is_shown_no_button_that_would_be_refused(door):
    seen = {
        role: json.loads(door.ask("GET", "/apps/ads/operate", **door.bearer[role]).text)
        for role in ("read", "operate")
    }
    assert [seen[role]["can_replay"] for role in ("read", "operate")] == [False, True]


def test_a_token_that_is_removed_is_refused_with_the_next_request(door):
    assert door.ask("GET", "/views", **door.bearer["read"]).status == 200
    TokenFile(door.path).remove("reader")
    assert door.ask("GET", "/views", **door.bearer["read"]).status == 401


# -- browsers ---------------------------------------------------------------------------------------


def test_a_browser_logs_in_for_a_cookie_that_is_no_token_and_logs_out(door):
    shown = door.ask("GET", "/", Accept="text/html")
    assert (shown.status, shown.headers["location"]) == (303, "/login")
    assert 'id="login"' in door.ask("GET", "/login").text
    cookie = cookie_of(door)
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Secure" not in cookie
    assert not any(token in cookie for token in door.tokens.values())
    session = {"Cookie": cookie.partition(";")[0]}
    assert door.ask("GET", "/views", **session).status == 200
    who = json.loads(door.ask("GET", "/who", **session).text)
    assert who == {"name": "operateer", "role": "operate"}
    assert door.ask("POST", "/logout", "{}", Origin=door.url, **session).status == 200
    assert door.ask("GET", "/views", **session).status == 401


def test_a_session_ends_with_its_token_and_with_its_time(door):
    session = {"Cookie": cookie_of(door).partition(";")[0]}
    TokenFile(door.path).remove("operateer")
    assert door.ask("GET", "/views", **session).status == 401
    now = [0.0]
    sessions = LoginSessions(TokenFile.opened(door.path), lambda: now[0])
    begun, _ = sessions.begin(door.tokens["read"])
    now[0] = SESSION_S - 1
    assert sessions.principal(begun).name == "reader"
    now[0] = SESSION_S
    assert sessions.principal(begun) is None


def test_with_a_cookie_a_change_needs_the_origin_of_our_own_page(door):
    session = {"Cookie": cookie_of(door).partition(";")[0]}
    for origin in ({}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        answer = door.ask("POST", REPLAY, RECORDS, **JSON, **session, **origin)
        assert answer.status == 403, origin
    form = {"Content-Type": "text/plain", "Origin": door.url}
    assert door.ask("POST", REPLAY, RECORDS, **session, **form).status == 415
    assert AuditLog(door.log, "ads").read() == []
    assert door.ask("POST", REPLAY, RECORDS, Origin=door.url, **JSON, **session).status == 200


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"token": 1}', '{"token": "guess"}'])
def test_a_wrong_log_in_is_refused_without_a_cookie(door, body):
    answer = door.ask("POST", "/login", body, Origin=door.url, **JSON)
    assert answer.status in (400, 401)
    assert "set-cookie" not in answer.headers


def test_another_sites_page_cannot_log_a_browser_in(door):
    body = json.dumps({"token": door.tokens["read"]})
    refused = door.ask("POST", "/login", body, Origin="https://evil.example", **JSON)
    assert refused.status == 403
    assert door.ask("POST", "/login", body, Content_Type="text/plain").status == 415


# -- harm -------------------------------------------------------------------------------------------


def test_a_token_in_a_url_is_refused_and_never_repeated(door, caplog):
    for name in ("token", "access_token", "Token"):
        answer = door.ask("GET", f"/views?{name}={door.tokens['operate']}")
        assert answer.status == 400, answer
        assert door.tokens["operate"] not in answer.text
    assert not any(token in caplog.text for token in door.tokens.values())
    other = door.ask("GET", "/views/ad_ctr?token=7", **door.bearer["read"])
    assert "TokenInUrl" not in other.text, "a column may have the name"


def test_paths_that_lead_elsewhere_lead_nowhere(door):
    for path in (
        "/assets/../server.py",
        "/assets/..%2fserver.py",
        "/assets/%2e%2e/%2e%2e/server.py",
        "/assets//etc/passwd",
        "/assets/....//x",
        "//views",
        "/views/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/apps/..%2f..%2f/status",
    ):
        answer = door.ask("GET", path, **door.bearer["operate"])
        assert answer.status in (400, 404), (path, answer.status)
        assert "root:" not in answer.text


def test_no_response_is_split_and_no_line_of_the_log_forged(door, caplog):
    for path in (
        "/views/x%0d%0aSet-Cookie:%20a=b",
        "/x%0d%0aforged",
        "/login?x=%0d%0aLocation:%20y",
    ):
        answer = door.ask("GET", path, **door.bearer["read"])
        assert "set-cookie" not in answer.headers
        assert "location" not in answer.headers
        door.ask("GET", path)
    assert not any("\n" in record.getMessage() for record in caplog.records)


def _raw(url, data, timeout_s=60):
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=timeout_s) as connection:
        connection.sendall(data)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except ConnectionError:
            pass
        return found


def test_headers_without_end_are_refused(door):
    head = b"GET /views HTTP/1.1\r\nHost: x\r\nX: "
    found = _raw(door.url, head + b"a" * (1 << 20))
    assert b" 200 " not in found.partition(b"\r\n")[0]
    assert door.ask("GET", "/healthz").status == 200


def test_two_requests_in_one_are_not_taken_for_one(door):
    """A length that is said twice, differently, is no request: a proxy might have read the other one."""
    data = b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 40\r\n\r\nGET "
    assert _raw(door.url, data).startswith(b"HTTP/1.1 400")


def test_clients_that_never_end_their_headers_are_cut_off_and_hold_nobody_up(door, monkeypatch):
    monkeypatch.setattr(web, "_HEAD_S", 0.5)
    place = urlsplit(door.url)
    slow = [socket.create_connection((place.hostname, place.port), timeout=60) for _ in range(50)]
    try:
        for one in slow:
            one.sendall(b"GET /views HTTP/1.1\r\nHost: x\r\nX: ")
        assert door.ask("GET", "/healthz").status == 200
        ended, until_s = 0, time.monotonic() + 60
        while ended < len(slow) and time.monotonic() < until_s:
            ended = sum(_is_cut_off(one) for one in slow)
            time.sleep(0.1)
        assert ended == len(slow)
    finally:
        for one in slow:
            one.close()


def _is_cut_off(connection):
    """Send a byte of a header, as a client does that wants to look alive."""
    try:
        connection.sendall(b"a")
        connection.setblocking(False)
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.setblocking(True)


def test_a_stream_outlives_the_time_for_headers(door, monkeypatch):
    monkeypatch.setattr(web, "_HEAD_S", 0.3)
    place = urlsplit(door.url)
    with closing(http.client.HTTPConnection(place.hostname, place.port, timeout=60)) as connection:
        connection.request("GET", "/apps/ads/status/changes", headers=door.bearer["read"])
        answer = connection.getresponse()
        assert answer.readline().startswith(b"retry:")
        time.sleep(2.5)  # two looks at slow clients
        assert not answer.closed
        assert answer.fp.raw._sock.fileno() >= 0
        assert answer.readline() == b"\n"


def test_more_connections_than_there_may_be_are_ended(door, monkeypatch):
    monkeypatch.setattr(web, "CONNECTIONS_MAX", 5)
    place = urlsplit(door.url)
    held = [socket.create_connection((place.hostname, place.port), timeout=60) for _ in range(20)]
    try:
        until_s = time.monotonic() + 60
        while sum(_is_cut_off(one) for one in held) < 15 and time.monotonic() < until_s:
            time.sleep(0.05)
        assert sum(_is_cut_off(one) for one in held) >= 15
    finally:
        for one in held:
            one.close()


# -- addresses and TLS ------------------------------------------------------------------------------


def test_an_address_that_others_reach_needs_tokens_and_with_them_changes(ads, tmp_path):
    with (
        pytest.raises(ConfigError, match="--token-file"),
        serve(ads.log, listen="0.0.0.0:0"),
    ):
        pass
    ads.commit(row(0), row(1), dead={0: "field 'cost' is missing"})
    token = TokenFile(tmp_path / "tokens").add("alice", "operate")
    with serve(
        ads.log,
        listen="0.0.0.0:0",
        replay=partial(_replay, ads.log),
        token_file=tmp_path / "tokens",
    ) as serving:
        url = serving.url.replace("0.0.0.0", "127.0.0.1").rstrip("/")
        given = {"Authorization": f"Bearer {token}", "Host": "machine.example"}
        assert ask(url, "POST", REPLAY, RECORDS, **JSON, **given).status == 200


def test_over_tls_the_cookie_is_sent_over_tls_alone_and_a_renewed_certificate_is_used(
    ads, tmp_path
):
    first = made(tmp_path)
    tokens = tmp_path / "tokens"
    token = TokenFile(tokens).add("alice", "operate")
    with serve(
        ads.log,
        listen="127.0.0.1:0",
        token_file=tokens,
        tls_cert=first.cert,
        tls_key=first.key,
    ) as serving:
        url = serving.url.rstrip("/")
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=first.cert)
        body = json.dumps({"token": token})
        answer = ask(url, "POST", "/login", body, trusted, Origin=url, **JSON)
        assert "Secure" in answer.headers["set-cookie"]
        plain = url.replace("https", "http")
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(plain, "GET", "/healthz")
        made(tmp_path)
        renewed = ssl.create_default_context(cafile=first.cert)
        until_s = time.monotonic() + 60
        while True:
            try:
                assert ask(url, "GET", "/healthz", context=renewed).status == 200
                break
            except ssl.SSLError:
                assert time.monotonic() < until_s
                time.sleep(0.1)


def test_pages_of_an_origin_that_was_named_may_send_requests(ads, tmp_path):
    token = TokenFile(tmp_path / "tokens").add("alice", "read")
    with serve(
        ads.log,
        listen="127.0.0.1:0",
        token_file=tmp_path / "tokens",
        origins=("https://proxy.example",),
    ) as serving:
        url = serving.url.rstrip("/")
        body = json.dumps({"token": token})
        found = [
            ask(url, "POST", "/login", body, Origin=origin, **JSON).status
            for origin in ("https://proxy.example", "https://other.example")
        ]
    assert found == [200, 403]


def test_questions_are_refused_to_those_without_a_token_of_a_file(ads, tmp_path):
    token = TokenFile(tmp_path / "tokens").add("alice", "read")
    app = ms.App("asked", log=ads.log)
    with app.serve_questions("127.0.0.1:0", token_file=tmp_path / "tokens") as serving:
        url = serving.url.rstrip("/")
        assert ask(url, "GET", "/ask").status == 401
        assert ask(url, "GET", "/ask", Authorization=f"Bearer {token}").status != 401
