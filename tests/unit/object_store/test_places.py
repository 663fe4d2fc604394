"""Addresses of state, the places they lead to, and which run may use them."""

from pathlib import Path

import pytest

import millstream as ms
from millstream.errors import ConfigError
from millstream.log.files import DISK
from millstream.object_store.address import is_url, parse_state_url
from millstream.object_store.cached import CachedObjectStore
from millstream.object_store.folder import FolderStore
from millstream.object_store.generations import register_run
from millstream.object_store.place import StatePlace, new_place


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("s3://b/p", True),
        ("file:///a", True),
        ("hdfs://h/p", True),
        ("./data", False),
        ("/mnt/data", False),
        ("C:data", False),
        ("kafka:/x", False),
    ],
)
def test_a_url_is_told_from_a_folder(text, is_one):
    assert is_url(text) is is_one


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3a://bucket/a", "s3://bucket/a"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("az://container/a", "az://container/a"),
        ("hdfs://namenode/user/a", "hdfs://namenode/user/a"),
        ("file:///mnt/state", "file:///mnt/state"),
    ],
)
def test_urls_of_object_stores_are_taken(text, wanted):
    assert parse_state_url(text).text == wanted


@pytest.mark.parametrize(
    "text",
    [
        "s3://",
        "s3:///b",
        "s3://b//c",
        "s3://b/../c",
        "s3://b/a b",
        "file://host/x",
        "file:///a/../b",
        "file:///",
        "hdfs:///user/a",
        "hdfs://namenode:8020/user/a",
    ],
)
def test_what_is_no_place_is_refused(text):
    with pytest.raises(ConfigError, match="Give it as"):
        parse_state_url(text)


@pytest.mark.parametrize(
    "text", ["s3://key:SeCrEt@bucket/p", "s3://b/p?secret=SeCrEt", "s3://b/p#SeCrEt"]
)
def test_a_url_that_may_hold_a_secret_is_refused_and_not_shown(text):
    with pytest.raises(ConfigError) as refused:
        parse_state_url(text)
    assert "SeCrEt" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["webhdfs://name/p", "http://host/p", "postgresql://u:SeCrEt/x", "S3://b"]
)
def test_other_schemes_are_refused_with_the_way_out(text):
    with pytest.raises(ConfigError, match=r"mount the file system") as refused:
        parse_state_url(text)
    assert "SeCrEt" not in str(refused.value)


@pytest.mark.parametrize(
    "state", [Path("s3://me:pw@bucket/x"), " s3://me:pw@bucket/x", "s3:/bucket"]
)
def test_a_state_that_lost_a_slash_is_no_folder(state):
    with pytest.raises(ConfigError, match="begins like a URL and is none") as refused:
        ms.App("a", log="l", state=state)
    assert "pw" not in str(refused.value)
    assert ms.App("a", log="l", state="./s3:/bucket").folder == Path("s3:/bucket/apps/a")


def test_two_state_stores_of_one_app_never_meet_under_one_url():
    url = parse_state_url("s3://b/p")
    first, second = new_place("ads", url), new_place("ads", url)
    assert first.prefix != second.prefix
    assert first.text.startswith("s3://b/p/apps/ads/")
    assert StatePlace.from_message(first.to_message()) == first
    assert StatePlace.from_message(None) is None


def test_a_file_url_is_a_folder_and_the_others_go_through_the_cache(tmp_path, monkeypatch):
    place = StatePlace(parse_state_url(f"file://{tmp_path}"), "apps/a/1")
    store = place.open("runs")
    assert isinstance(store, FolderStore)
    assert store.folder == tmp_path / "apps/a/1/runs"
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MILLSTREAM_CACHE_BYTES", "12345")
    remote = StatePlace(parse_state_url("s3://b/p"), "apps/a/1").open("runs")
    assert isinstance(remote, CachedObjectStore)
    assert (remote.url, remote.cache.folder, remote.cache.size_max) == (
        "s3://b/p/apps/a/1/runs",
        tmp_path / "cache",
        12345,
    )
    monkeypatch.setenv("MILLSTREAM_CACHE_BYTES", "10 GiB")
    with pytest.raises(ConfigError, match="Give a number of bytes"):
        StatePlace(parse_state_url("s3://b/p"), "apps/a/1").open("runs")


@pytest.fixture(params=["folder", "object store"])
def place(request, tmp_path):
    if request.param == "folder":
        return StatePlace(parse_state_url(f"file://{tmp_path}"), "apps/a/1")
    return StatePlace(parse_state_url(request.getfixturevalue("s3_url")), "apps/a/1")


def test_runs_that_follow_each_other_begin(place):
    for run in (1, 2, 7):
        register_run(place, run)


@pytest.mark.parametrize("run", [3, 2])
def test_a_run_of_an_older_state_store_is_refused(place, run):
    register_run(place, 3)
    with pytest.raises(
        ConfigError, match=f"was used by run 3 of the app, and this state store is at run {run}"
    ):
        register_run(place, run)


def test_the_folders_that_a_place_makes_are_as_durable_as_its_objects(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(DISK, "sync_folder", synced.append)
    store = StatePlace(parse_state_url(f"file://{tmp_path}/state"), "apps/a/1").open("runs")
    store.put("1-a", lambda file: file.write(b"x"))
    store.sync()
    made = ("", "state", "state/apps", "state/apps/a", "state/apps/a/1", "state/apps/a/1/runs")
    assert set(synced) == {tmp_path / name for name in made}
    synced.clear()
    store.put("1-b", lambda file: file.write(b"x"))
    store.sync()
    assert synced == [tmp_path / "state/apps/a/1/runs"]
