"""The faults of HDFS, at each of the three steps of a put and the two of a get; what crashes leave; where it is, and who asks."""

import itertools
import os
import shutil
import threading
import urllib.request
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pyarrow as pa
import pytest
from hdfs_server import USER
from s3_server import Fault

from millstream.errors import EnvironmentProblem, ObjectStoreUnavailableError
from millstream.object_store import client as client_module
from millstream.object_store import webhdfs
from millstream.object_store.cached import checksum_of
from millstream.object_store.client import ObjectClient
from millstream.object_store.retries import RetryLimits
from millstream.object_store.store import Extent

DATA = os.urandom(300_000)
WHOLE = Extent(0, len(DATA), whole=True, checksum=checksum_of(pa.py_buffer(DATA)))
QUICK = RetryLimits(60, 0.005, 0.02)
HDFS = pytest.mark.long


@pytest.fixture(autouse=True)
def _environment_is_read_again():
    client_module.open_requests.cache_clear()
    yield
    client_module.open_requests.cache_clear()


def put(store, name="1-a", data=DATA):
    store.put(name, lambda file: file.write(data))
    store.sync()


def every_file(hdfs, url):
    """What a folder of HDFS has, drafts included."""
    address = hdfs.environment()["MILLSTREAM_WEBHDFS"]
    folder = url.removeprefix("hdfs://namenode")
    asked = f"{address}/webhdfs/v1{folder}?op=LISTSTATUS&user.name={USER}"
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return answer.read().decode()


def fails(step, times, kind):
    """Decide on a fault of one step of a put: "create" and "rename" are the namenode's, "write" is the datanode's."""
    left = [times]

    def decide(method, path):
        of_step = step == "write" or f"op={'CREATE' if step == 'create' else 'RENAME'}&" in path
        if method != "PUT" or not of_step or not left[0]:
            return None
        left[0] -= 1
        return Fault(kind, 0.1)

    return decide


@HDFS
@pytest.mark.parametrize("kind", ["503", "cut upload", "lost answer", "slow", "silence"])
@pytest.mark.parametrize("step", ["create", "write", "rename"])
def test_an_upload_survives_two_faults_of_any_step(hdfs, new_hdfs_store, step, kind):
    (hdfs.data if step == "write" else hdfs.names).decide = fails(step, 2, kind)
    store = new_hdfs_store()
    put(store)
    assert store.requests.retries == (0 if kind == "slow" else 2)
    assert new_hdfs_store().client.get("1-a").to_pybytes() == DATA
    assert list(new_hdfs_store().names()) == ["1-a"]


@HDFS
@pytest.mark.parametrize("kind", ["503", "cut download", "lost answer", "slow", "silence"])
@pytest.mark.parametrize("proxy", ["names", "data"])
def test_a_download_survives_two_faults(hdfs, new_hdfs_store, tmp_path, proxy, kind):
    put(new_hdfs_store())
    shutil.rmtree(tmp_path / "cache")
    getattr(hdfs, proxy).fail_first(2, "GET", kind)
    store = new_hdfs_store()
    assert store.read("1-a", WHOLE).data.to_pybytes() == DATA


@HDFS
@pytest.mark.parametrize("proxy", ["names", "data"])
def test_a_server_that_does_not_answer_in_time_is_tried_again(
    hdfs, new_hdfs_store, monkeypatch, proxy
):
    client = new_hdfs_store().client
    client.put("1-a", memoryview(DATA))
    monkeypatch.setattr(webhdfs, "TIMEOUT_S", 1)
    getattr(hdfs, proxy).decide = one_slow_request(6)
    assert client.get("1-a").to_pybytes() == DATA
    assert client.counts.retries >= 1


def one_slow_request(seconds):
    numbers = itertools.count()
    return lambda *_: None if next(numbers) else Fault("slow", seconds)


@HDFS
@pytest.mark.parametrize("step", ["create", "write", "rename"])
def test_a_put_that_is_never_finished_leaves_no_object(hdfs, new_hdfs_store, step):
    (hdfs.data if step == "write" else hdfs.names).decide = fails(step, 10**9, "503")
    with pytest.raises(ObjectStoreUnavailableError):
        put(new_hdfs_store(policy=RetryLimits(1, 0.01, 0.05)))
    hdfs.forget()
    store = new_hdfs_store()
    assert list(store.names()) == []
    put(store, data=DATA[::-1])
    assert store.client.get("1-a").to_pybytes() == DATA[::-1]


@HDFS
def test_of_writers_of_one_name_one_succeeds(new_hdfs_store):
    clients = [new_hdfs_store().client for _ in range(4)]
    contents = [bytes([number]) * 1000 for number in range(4)]
    won = []

    def write(number):
        try:
            clients[number].put("manifest", memoryview(contents[number]))
        except FileExistsError:
            return
        won.append(number)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(won) == 1
    assert clients[0].get("manifest").to_pybytes() == contents[won[0]]


@HDFS
def test_drafts_are_in_no_listing_and_go_after_an_hour(hdfs, hdfs_url, new_hdfs_store, monkeypatch):
    hdfs.names.decide = fails("rename", 10**9, "503")
    with pytest.raises(ObjectStoreUnavailableError):
        put(new_hdfs_store(policy=RetryLimits(1, 0.01, 0.05)))
    hdfs.forget()
    assert list(new_hdfs_store().names()) == []
    assert ".draft" in every_file(hdfs, hdfs_url)  # somebody may be about to rename it
    later = format_datetime(datetime.now(UTC) + timedelta(hours=2), usegmt=True)
    asked = webhdfs._request

    def two_hours_later(*arguments):
        answer = asked(*arguments)
        del answer.headers["Date"]
        answer.headers["Date"] = later
        return answer

    monkeypatch.setattr(webhdfs, "_request", two_hours_later)
    assert list(new_hdfs_store().names()) == []
    assert ".draft" not in every_file(hdfs, hdfs_url)


@HDFS
def test_names_are_in_order_across_folders_and_keep_their_characters(new_hdfs_store):
    store = new_hdfs_store()
    names = sorted(["a/b", "a-b", "a/b-c/d", "a.b", "k=x%2Fy %25/f", "ä ö/1", "a/é", "b+c&d=e#f"])
    for name in names:
        put(store, name, name.encode())
    assert list(store.names()) == names
    for name in names:
        assert store.client.get(name).to_pybytes() == name.encode()
        assert store.client.size(name) == len(name.encode())


@HDFS
def test_a_listing_and_a_delete_go_on_where_they_failed(hdfs, hdfs_url, new_hdfs_store):
    client = new_hdfs_store().client
    names = [f"{folder}/{number}" for folder in "abcd" for number in range(3)]
    for name in names:
        client.put(name, memoryview(b"x"))
    numbers = itertools.count()
    hdfs.names.decide = lambda *_: Fault("503") if next(numbers) % 3 else None
    assert list(client.names()) == names
    client.delete(names)
    hdfs.forget()
    assert list(client.names()) == []


@HDFS
def test_when_all_is_deleted_no_folder_is_left(hdfs, hdfs_url, new_hdfs_store):
    store = new_hdfs_store()
    for name in ("a/b/1", "a/2", "3"):
        put(store, name)
    store.delete_all()
    with pytest.raises(OSError, match="404"):
        every_file(hdfs, hdfs_url)
    store.delete_all()


@HDFS
def test_the_next_namenode_is_asked_where_one_does_not_answer(hdfs, hdfs_url, monkeypatch):
    monkeypatch.setenv(
        "MILLSTREAM_WEBHDFS", f"http://127.0.0.1:1, {hdfs.environment()['MILLSTREAM_WEBHDFS']}/"
    )
    client = ObjectClient(hdfs_url, QUICK)
    client.put("1-a", memoryview(DATA))
    assert client.get("1-a").to_pybytes() == DATA
    assert client.counts.retries == 1


@HDFS
def test_a_datanode_that_failed_is_left_out_and_asked_again_if_there_is_no_other(
    hdfs, new_hdfs_store
):
    client = new_hdfs_store().client
    client.put("1-a", memoryview(DATA))
    hdfs.names.requests.clear()
    hdfs.data.fail_first(1, "GET", "cut download")
    assert client.get("1-a").to_pybytes() == DATA
    left_out = ["excludedatanodes=127.0.0.1" in path for _, path in hdfs.names.requests]
    assert left_out == [False, True, False]  # the namenode knows no other, and says so
    assert client.counts.retries == 1


@HDFS
def test_who_may_not_write_is_told_at_once(hdfs, monkeypatch):
    monkeypatch.setenv("HADOOP_USER_NAME", "nobody-special")
    with pytest.raises(EnvironmentProblem, match=r"\(AccessControlException\).*HADOOP_USER_NAME"):
        ObjectClient("hdfs://namenode/forbidden").put("a", memoryview(b"x"))


def test_nothing_at_the_address_is_told(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WEBHDFS", "http://127.0.0.1:1")
    with pytest.raises(ObjectStoreUnavailableError, match="no connection"):
        ObjectClient("hdfs://namenode/a", RetryLimits(0.1, 0.01, 0.01)).get("1-a")


def test_a_server_that_is_no_namenode_is_told_at_once(google_proxy, monkeypatch):
    proxy, _key = google_proxy
    monkeypatch.setenv("MILLSTREAM_WEBHDFS", f"http://127.0.0.1:{proxy.port}")
    with pytest.raises(EnvironmentProblem, match="MILLSTREAM_WEBHDFS"):
        ObjectClient("hdfs://namenode/a").get("1-a")


@pytest.mark.parametrize("address", ["namenode:9870", "hdfs://namenode", "http://", ","])
def test_an_address_that_is_none_is_told(monkeypatch, address):
    monkeypatch.setenv("MILLSTREAM_WEBHDFS", address)
    with pytest.raises(EnvironmentProblem, match="Give the addresses of the namenodes"):
        ObjectClient("hdfs://namenode/a").get("1-a")


def test_the_address_is_the_urls_where_the_environment_has_none(monkeypatch):
    monkeypatch.delenv("MILLSTREAM_WEBHDFS", raising=False)
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    asked = webhdfs.WebHdfs.open("hdfs://names.example.org/user/a")
    assert (asked.addresses, asked.folder, asked.user) == (
        ["http://names.example.org:9870"],
        "/user/a",
        "somebody",
    )
