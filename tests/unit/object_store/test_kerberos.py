"""HDFS that wants Kerberos: tickets, keytabs, what is said without them, and what an expired one costs."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import hdfs_cluster
import hdfs_server
import kerberos_server
import pytest
from hdfs_server import OPTIONS, START_S, write_settings
from kerberos_server import HOST, REALM, Kdc
from state_app import minutes, run, send

from millstream.errors import EnvironmentProblem, ObjectStoreUnavailableError
from millstream.object_store import client as client_module
from millstream.object_store.client import ObjectClient
from millstream.object_store.kerberos import proof
from millstream.object_store.retries import RetryLimits
from millstream.object_store.webhdfs import WebHdfs
from millstream.spark.runtime.java import find_java
from millstream.testing.free_ports import free_ports

DATA = os.urandom(300_000)
TICKETS = pytest.mark.long


@pytest.fixture
def refusing(monkeypatch):
    """An address whose HTTP server wants a ticket of everybody, and takes none."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Negotiate")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("MILLSTREAM_WEBHDFS", f"http://127.0.0.1:{server.server_port}")
    client_module.open_requests.cache_clear()
    yield
    client_module.open_requests.cache_clear()
    server.shutdown()
    thread.join()
    server.server_close()


def test_without_the_package_the_error_names_it(refusing, monkeypatch):
    monkeypatch.setitem(sys.modules, "gssapi", None)
    with pytest.raises(EnvironmentProblem, match=r"wants Kerberos.*millstream\[kerberos\]"):
        ObjectClient("hdfs://namenode/a").get("1-a")


@pytest.fixture(scope="module")
def kdc(tmp_path_factory):
    pytest.importorskip("gssapi", reason="the extra `kerberos` is not installed here")
    if reason := kerberos_server.why_not() or hdfs_server.HADOOP.why_not():
        pytest.skip(reason)
    with ExitStack() as opened:
        yield Kdc(tmp_path_factory.mktemp("kerberos") / "kdc", opened)


@pytest.fixture(scope="module")
def secure_hdfs(kdc, tmp_path_factory):
    """An HDFS that wants Kerberos; alice's tickets are valid for an hour, carol's for five seconds."""
    kdc.keytab("alice", "-maxlife", "1hour")
    kdc.keytab("bob")
    kdc.keytab("carol", "-maxlife", "5seconds")
    options = (f"-Djava.security.krb5.conf={kdc.config}",)
    folder = tmp_path_factory.mktemp("secure-hdfs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KRB5_CONFIG", str(kdc.config))
        patch.setenv("KRB5CCNAME", f"FILE:{kdc.probe}")
        ask = partial(proof, HOST)
        with hdfs_server.hdfs(folder, HOST, kdc.hdfs_settings(), options, ask) as served:
            yield served


@pytest.fixture
def cache(kdc, secure_hdfs, tmp_path, monkeypatch):
    """Where a client's tickets are; there are none yet."""
    monkeypatch.setenv("KRB5_CONFIG", str(kdc.config))
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path}/tickets")
    monkeypatch.setenv("KRB5_CLIENT_KTNAME", f"{tmp_path}/none")
    monkeypatch.setenv("MILLSTREAM_WEBHDFS", secure_hdfs.environment()["MILLSTREAM_WEBHDFS"])
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody-else")  # which counts without Kerberos alone
    secure_hdfs.forget()
    client_module.open_requests.cache_clear()
    yield tmp_path / "tickets"
    client_module.open_requests.cache_clear()


@TICKETS
def test_with_a_ticket_objects_are_put_and_read(kdc, cache):
    kdc.take_ticket("alice", cache)
    client = ObjectClient("hdfs://namenode/user/alice")
    client.put("a/1", memoryview(DATA))
    with pytest.raises(FileExistsError):
        client.put("a/1", memoryview(DATA[::-1]))
    assert client.get("a/1").to_pybytes() == DATA
    assert list(client.objects()) == [("a/1", len(DATA))]
    client.delete(["a/1"])
    client.delete_folders()
    assert list(client.names()) == []
    assert client.counts.retries == 0
    requests = client_module.open_requests(client.url, os.getpid())
    assert isinstance(requests, WebHdfs)
    assert requests.user == "alice"  # whose drafts it may remove


@TICKETS
def test_a_ticket_is_shown_once_for_many_requests(kdc, cache, secure_hdfs):
    kdc.take_ticket("alice", cache)
    client = ObjectClient("hdfs://namenode/user/alice")
    client.put("b/1", memoryview(b"x"))
    secure_hdfs.names.requests.clear()
    began = time.monotonic()
    for _ in range(20):
        client.get("b/1")
    again = len(secure_hdfs.names.requests) - 20  # a cookie is valid for two seconds
    assert 0 <= again <= 1 + (time.monotonic() - began) / 2


@TICKETS
def test_without_a_ticket_the_error_says_how_to_get_one(cache):
    with pytest.raises(EnvironmentProblem, match=r"no valid ticket.*kinit.*KRB5_CLIENT_KTNAME"):
        ObjectClient("hdfs://namenode/user/alice").put("c/1", memoryview(b"x"))


@TICKETS
def test_who_may_not_write_is_told_at_once(kdc, cache):
    kdc.take_ticket("bob", cache)
    with pytest.raises(EnvironmentProblem, match=r"AccessControlException"):
        ObjectClient("hdfs://namenode/forbidden").put("a", memoryview(b"x"))


@TICKETS
def test_an_expired_ticket_is_told_and_a_new_one_is_taken(kdc, cache):
    kdc.keytab("dora", "-maxlife", "5seconds")
    kdc.take_ticket("dora", cache)
    client = ObjectClient("hdfs://namenode/")
    assert client.size("none") is None
    pause, deadline = threading.Event(), time.monotonic() + 60
    with pytest.raises(EnvironmentProblem, match=r"no valid ticket.*kinit"):
        while time.monotonic() < deadline:
            client.size("none")
            pause.wait(0.5)
    kdc.take_ticket("dora", cache)
    assert client.size("none") is None


@TICKETS
def test_with_a_keytab_an_app_goes_on_while_its_tickets_expire(kdc, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "app-cache"))
    monkeypatch.setenv("KRB5_CLIENT_KTNAME", str(kdc.folder / "carol.keytab"))
    for folder in (tmp_path / "near", tmp_path / "far"):
        send(folder, 0, 3000)
    pause = threading.Event()
    # 16 seconds at least: three times the life of a ticket
    assert run(tmp_path / "far", "hdfs://namenode/app", lambda _: pause.wait(1.2)) >= 14
    run(tmp_path / "near", None)
    assert minutes(tmp_path / "far") == minutes(tmp_path / "near")
    assert len(minutes(tmp_path / "far")) > 100


@pytest.fixture
def secure_gateway(kdc, cache, secure_hdfs, tmp_path, monkeypatch):
    """A gateway (HttpFS) before it, which wants Kerberos, too."""
    if reason := hdfs_cluster.GATEWAY.why_not():
        pytest.skip(reason)
    (port,) = free_ports(1)
    own = kdc.gateway_settings() | {"httpfs.http.hostname": HOST, "httpfs.http.port": port}
    settings, options = hdfs_cluster.make_gateway(tmp_path / "gateway", own)
    common = {
        "fs.defaultFS": secure_hdfs.url,
        "hadoop.security.authentication": "kerberos",
        "dfs.namenode.kerberos.principal": f"hdfs/{HOST}@{REALM}",
    }
    for name in ("core-site.xml", "hdfs-site.xml"):
        write_settings(settings / name, common)
    java, said = find_java(os.environ), tmp_path / "gateway.log"
    classes = f"{settings}:{hdfs_cluster.GATEWAY.jars()}/*"
    command = [str(java.executable), *OPTIONS, f"-Djava.security.krb5.conf={kdc.config}", *options]
    with said.open("wb") as out:
        process = subprocess.Popen(
            [*command, "-cp", classes, hdfs_cluster.GATEWAY_PROGRAM],
            stdout=out,
            stderr=out,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        )
    try:
        deadline, pause = time.monotonic() + START_S, threading.Event()
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection((HOST, port), 10):
                break
            pause.wait(0.2)
        monkeypatch.setenv("MILLSTREAM_WEBHDFS", f"http://{HOST}:{port}")
        yield said
    finally:
        process.kill()
        process.wait(30)


@TICKETS
def test_behind_a_gateway_objects_are_put_and_read(kdc, secure_gateway, cache):
    client = ObjectClient("hdfs://namenode/user/alice")
    with pytest.raises(EnvironmentProblem, match="no valid ticket"):
        client.put("g/1", memoryview(DATA))
    kdc.take_ticket("alice", cache)
    pause = threading.Event()
    for number in range(3):
        client.put(f"g/{number}", memoryview(DATA))
        pause.wait(2.2)  # longer than a cookie is valid
        assert client.get(f"g/{number}").to_pybytes() == DATA, secure_gateway.read_text()[-3000:]
    with pytest.raises(FileExistsError):
        client.put("g/1", memoryview(DATA[::-1]))
    assert client.counts.retries == 0


@TICKETS
def test_a_kdc_that_does_not_answer_is_asked_again(kdc, cache, tmp_path, monkeypatch):
    away = tmp_path / "away.conf"
    port = kdc.config.read_text().split("kdc = 127.0.0.1:")[1].split()[0]
    away.write_text(kdc.config.read_text().replace(f"127.0.0.1:{port}", "127.0.0.1:1"))
    monkeypatch.setenv("KRB5_CONFIG", str(away))
    kdc.take_ticket("alice", cache)
    client = ObjectClient("hdfs://namenode/user/alice", RetryLimits(1, 0.05, 0.2))
    with pytest.raises(ObjectStoreUnavailableError, match=rf"no ticket for HTTP/{HOST}"):
        client.get("a")
