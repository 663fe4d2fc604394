"""Starting and ending the server: addresses, what is refused, and the command."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest

from millstream.cli.main import run
from millstream.errors import ConfigError, EnvironmentProblem
from millstream.listen_address import parse_listen_address
from millstream.views.server import server
from millstream.views.server.server import LISTEN_DEFAULT, serve


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8400", ("127.0.0.1", 8400)),
        (":8400", ("127.0.0.1", 8400)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_an_address_is_host_and_port(text, address):
    assert parse_listen_address(text, LISTEN_DEFAULT) == address


@pytest.mark.parametrize("text", ["8400", "host", "h:99999", "::1:80", "h:-1", "a b:1", ""])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="Give HOST:PORT"):
        parse_listen_address(text, LISTEN_DEFAULT)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:8400", "example.org:80"])
def test_an_address_that_others_reach_is_refused_unless_asked_for(tmp_path, listen):
    with pytest.raises(ConfigError, match="no authentication"), serve(tmp_path, listen=listen):
        pass


def test_an_address_that_others_reach_can_be_asked_for(tmp_path):
    with serve(tmp_path, listen="0.0.0.0:0", insecure=True) as up:
        port = up.url.rstrip("/").rpartition(":")[2]
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/apps", headers={"Host": "some.name"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.read() == b'{"apps": []}\n'


def test_a_port_that_is_taken_is_said_to_be(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = pytest.raises(ConfigError, match=f"Port {port} of 127.0.0.1 is taken")
        with taken, serve(tmp_path, listen=f"127.0.0.1:{port}"):
            pass


def test_an_address_of_another_machine_is_said_to_be(tmp_path):
    refused = pytest.raises(ConfigError, match="Choose another address")
    with refused, serve(tmp_path, listen="192.0.2.1:8400", insecure=True):
        pass


def test_without_the_extra_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    missing = pytest.raises(EnvironmentProblem, match=r'pip install "millstream\[ui\]"')
    with missing, serve(tmp_path, listen="127.0.0.1:0"):
        pass


def test_a_block_that_fails_ends_the_server(tmp_path):
    with pytest.raises(KeyError), serve(tmp_path, listen="127.0.0.1:0") as up:
        raise KeyError
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(up.url, timeout=60)
    assert "millstream page" not in {thread.name for thread in threading.enumerate()}


def test_the_page_is_there_without_any_other_host(server):
    page = server.ask("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in re.findall(r'(?:src|href)="/(assets/[^"]+)"', page.text):
        text = server.ask(f"/{name}").text
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), name
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert server.ask(f"/assets/{module}").status == 200
    assert not re.search(r"https?://", page.text)
    assert server.ask("/", headers={"If-None-Match": page.headers["etag"]}).status == 304
    assert server.ask("/assets/nope.js").status == 404


def test_the_command_serves_until_it_is_interrupted(ads):
    command = [sys.executable, "-m", "millstream", "ui", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--log", str(ads.log)], stdout=subprocess.PIPE, text=True)
    said = process.stdout.readline()
    url = re.search(r"http://127\.0\.0\.1:\d+/", said)[0]
    with urllib.request.urlopen(f"{url}views/ad_ctr", timeout=60) as answer:
        assert answer.status == 200
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0


def test_the_command_refuses_what_others_could_reach(tmp_path, capsys):
    assert run(["ui", "--log", str(tmp_path), "--listen", "0.0.0.0:8400"]) == 2
    assert "no authentication" in capsys.readouterr().err
    assert server.LISTEN_DEFAULT.startswith("127.0.0.1:")
