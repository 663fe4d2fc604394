"""`millstream docs` serves the pages that came with the package, and nothing else."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
import zipfile
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from millstream import plain_http
from millstream.cli.main import run
from millstream.cli.site_server import CONNECTIONS_MAX, content_type, serve_site
from millstream.errors import ConfigError, EnvironmentProblem

FILES = {"index.html": "<p>first", "docs/a.md": "# A", "docs/b.py": "x = 1", "docs/ü.css": "p {}"}


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "site.zip"
    with zipfile.ZipFile(path, "w") as site:
        for name, text in FILES.items():
            site.writestr(name, text)
    return path


def get(url, method="GET"):
    with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
        return answer.read().decode(), answer.headers


def test_pages_are_served_from_the_package(packed):
    with serve_site(packed, listen="127.0.0.1:0") as url:
        assert get(url)[0] == "<p>first"
        assert get(f"{url}index.html?q=1#x")[0] == "<p>first"
        text, headers = get(f"{url}docs/a.md")
        assert (text, headers["Content-Type"]) == ("# A", "text/plain; charset=utf-8")
        assert get(f"{url}docs/%C3%BC.css")[1]["Content-Type"] == "text/css; charset=utf-8"
        body, headers = get(f"{url}docs/b.py", "HEAD")
        assert (body, headers["Content-Length"]) == ("", "5")


@pytest.mark.parametrize("path", ["docs", "docs/", "../site.zip", "%2e%2e/site.zip", "none.html"])
def test_what_is_no_page_is_not_found(packed, path):
    with serve_site(packed, listen="127.0.0.1:0") as url:
        with pytest.raises(urllib.error.HTTPError, match="404") as raised:
            get(url + path)
        with raised.value as answer:
            assert b"no such page" in answer.read()


def test_a_package_without_documentation_says_what_to_do(tmp_path):
    with (
        pytest.raises(EnvironmentProblem, match="make docs"),
        serve_site(tmp_path / "site.zip", listen="127.0.0.1:0"),
    ):
        pass


def test_clients_that_send_nothing_do_not_fill_memory_with_threads(packed, monkeypatch):
    monkeypatch.setattr(plain_http.PlainRequest, "timeout", 600)
    with serve_site(packed, listen="127.0.0.1:0") as url, ExitStack() as idle:
        place = ("127.0.0.1", urlsplit(url).port)
        for _ in range(CONNECTIONS_MAX):
            idle.enter_context(socket.create_connection(place, timeout=300))
        with socket.create_connection(place, timeout=300) as refused:
            assert refused.recv(1) == b""


def test_an_address_that_is_taken_is_refused(packed):
    with serve_site(packed, listen="127.0.0.1:0") as url:
        taken = url.removeprefix("http://").rstrip("/")
        with pytest.raises(ConfigError, match="taken"), serve_site(packed, listen=taken):
            pass


def test_an_address_that_is_none_is_refused(capsys):
    assert run(["docs", "--listen", "nowhere"]) == 2
    assert "HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.html", "text/html; charset=utf-8"),
        ("a.svg", "image/svg+xml"),
        ("a.toml", "text/plain; charset=utf-8"),
        ("LICENSE", "text/plain; charset=utf-8"),
        ("a.png", "image/png"),
    ],
)
def test_a_file_is_what_a_browser_can_show(name, kind):
    assert content_type(name) == kind
