"""An object store that fails, is slow, or cuts connections; a cache that vanishes, is damaged, or full."""

import logging
import os
import shutil
import time

import pyarrow as pa
import pytest
from s3_server import SECRET, Fault

from millstream.errors import CorruptionError, EnvironmentProblem, ObjectStoreUnavailableError
from millstream.object_store.cached import CachedObjectStore, checksum_of
from millstream.object_store.client import ObjectClient
from millstream.object_store.cloud_requests import CloudRequests
from millstream.object_store.retries import RetryLimits
from millstream.object_store.store import Extent

DATA = os.urandom(300_000)
WHOLE = Extent(0, len(DATA), whole=True, checksum=checksum_of(pa.py_buffer(DATA)))


def put(store, name="1-a", data=DATA):
    store.put(name, lambda file: file.write(data))
    store.sync()


@pytest.mark.parametrize("kind", ["503", "409", "cut upload", "lost answer", "slow", "silence"])
def test_an_upload_survives_two_faults_and_says_so_in_one_line(s3, new_store, kind, caplog):
    s3.fail_first(2, "PUT", kind)
    store = new_store()
    with caplog.at_level(logging.WARNING):
        put(store)
    s3.decide = lambda *_: None
    assert new_store().client.get("1-a").to_pybytes() == DATA
    assert store.requests.retries == (0 if kind == "slow" else 2)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if kind == "slow" else 1)
    assert all("succeeded at try 3" in line and SECRET not in line for line in lines)


@pytest.mark.parametrize("kind", ["503", "cut download", "lost answer", "slow", "silence"])
def test_a_download_survives_two_faults(s3, new_store, tmp_path, kind):
    put(new_store())
    shutil.rmtree(tmp_path / "cache")
    s3.fail_first(2, "GET", kind)
    store = new_store()
    assert store.read("1-a", WHOLE).data.to_pybytes() == DATA
    assert store.requests.gets == (1 if kind == "slow" else 3)


def test_a_name_that_was_taken_and_removed_meanwhile_is_taken(s3, new_store, monkeypatch):
    client = new_store().client
    client.put("1-a", memoryview(b"another's"))

    def gone(self, name):
        raise FileNotFoundError(name)

    monkeypatch.setattr(ObjectClient, "get", gone)
    s3.fail_first(1, "PUT", "503")
    with pytest.raises(FileExistsError):
        client.put("1-a", memoryview(b"ours"))


def test_a_torn_upload_leaves_no_object(s3, new_store):
    s3.fail_first(10**9, "PUT", "cut upload")
    with pytest.raises(ObjectStoreUnavailableError):
        put(new_store())
    s3.decide = lambda *_: None
    assert list(new_store().names()) == []


def test_a_final_failure_is_one_error_with_the_url(s3, new_store, s3_url):
    s3.fail_first(10**9, "PUT", "503")
    with pytest.raises(ObjectStoreUnavailableError) as failed:
        put(new_store(policy=RetryLimits(0.3, 0.01, 0.05)))
    message = str(failed.value)
    assert f"put {s3_url}/1-a failed" in message
    assert "status 503 Service Unavailable (SlowDown)" in message
    assert "\n" not in message


def test_a_server_that_does_not_answer_in_time_is_tried_again(s3, new_store, monkeypatch):
    from millstream.object_store import client, cloud_requests

    monkeypatch.setattr(cloud_requests, "TIMEOUT_S", 1)
    client.open_requests.cache_clear()
    store = new_store(policy=RetryLimits(20, 0.01, 0.02))
    put(store)
    failing_for = Fault("slow", 2)
    asked = []

    def decide(method, _path):
        asked.append(method)
        return failing_for if len(asked) == 1 else None

    s3.decide = decide
    began = time.monotonic()
    assert store.client.get("1-a").to_pybytes() == DATA
    assert time.monotonic() - began < 15
    assert store.requests.retries == 1
    client.open_requests.cache_clear()


def test_wrong_credentials_are_refused_at_once_and_not_shown(s3, new_store, monkeypatch):
    from millstream.object_store import client

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "some-other-secret")
    client.open_requests.cache_clear()
    with pytest.raises(
        EnvironmentProblem, match=r"status 403 Forbidden \(SignatureDoesNotMatch\)"
    ) as e:
        put(new_store())
    assert "tester" not in str(e.value)
    assert "other-secret" not in str(e.value)
    assert s3.count("PUT") == 1
    client.open_requests.cache_clear()


def test_a_bucket_that_is_not_there_is_told(s3):
    client = ObjectClient("s3://none/p")
    for call in (
        lambda: client.put("a", memoryview(b"x")),
        lambda: client.get("a"),
        lambda: list(client.names()),
    ):
        with pytest.raises(EnvironmentProblem, match="bucket"):
            call()


def test_a_bucket_of_another_region_is_told_at_once(s3, new_store):
    s3.decide = lambda *_: Fault("301")
    client = new_store().client
    for call in (lambda: client.get("1-a"), lambda: list(client.names())):
        with pytest.raises(EnvironmentProblem, match=r"is in another region\. .*AWS_REGION"):
            call()
    assert len(s3.requests) == 2


@pytest.mark.parametrize(
    ("scheme", "named"), [("s3", "AWS_ACCESS_KEY_ID"), ("gs", "GOOGLE_APPLICATION_CREDENTIALS")]
)
@pytest.mark.parametrize("refused", [True, False], ids=["refused", "no answer"])
def test_an_environment_without_credentials_is_told(monkeypatch, scheme, named, refused):
    from millstream.object_store import client

    # what the library says where it asks the cloud's machine for credentials
    said = "status code: 404 Not Found" if refused else "HttpError { kind: Connect"

    class Failing:
        def get(self, _name):
            raise OSError(f"Error performing GET http://169.254.169.254/latest in 1 ms - {said}")

    monkeypatch.setattr(client, "open_requests", lambda *_: Failing())
    asked = ObjectClient(f"{scheme}://bucket/p", RetryLimits(0.05, 0.01, 0.01))
    with pytest.raises(EnvironmentProblem, match=f"has no credentials.*{named}"):
        asked.get("1-a")
    assert (asked.counts.retries > 0) is not refused


@pytest.mark.parametrize(
    "variables",
    [{}, {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "no base64!"}],
)
def test_an_environment_without_an_account_is_told(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentProblem, match="AZURE_STORAGE_ACCOUNT_NAME") as told:
        ObjectClient(f"az://none/{len(variables)}").get("1-a")
    assert "no base64!" not in str(told.value)


@pytest.mark.parametrize("page", range(4))
@pytest.mark.parametrize("failures", [1, 2])
def test_a_listing_that_fails_gives_each_name_once(monkeypatch, page, failures):
    from millstream.object_store import client

    pages = [["a", "b"], ["c", "d"], ["e"]]
    left = [failures]

    class Library:
        def list(self, _prefix, *, chunk_size):
            for number, names in enumerate([*pages, []]):
                if number == page and left[0]:
                    left[0] -= 1
                    raise OSError("Generic error: status code: 503 Slow Down")
                yield [{"path": name, "size": number} for name in names]

    monkeypatch.setattr(client, "open_requests", lambda url, _: CloudRequests(url, Library()))
    asked = ObjectClient("s3://bucket/p", RetryLimits(5, 0.001, 0.002))
    assert list(asked.names()) == ["a", "b", "c", "d", "e"]
    assert asked.counts.retries == failures


def test_nothing_at_the_endpoint_is_told(monkeypatch, s3, new_store):
    from millstream.object_store import client

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    client.open_requests.cache_clear()
    with pytest.raises(ObjectStoreUnavailableError, match="no connection"):
        new_store(policy=RetryLimits(0.1, 0.01, 0.01)).client.get("1-a")
    client.open_requests.cache_clear()


# -- the cache ----------------------------------------------------------------------------


def cached_files(tmp_path):
    return sorted((tmp_path / "cache").iterdir())


def test_what_this_machine_wrote_is_not_downloaded(s3, new_store):
    put(new_store())
    again = new_store()
    assert again.read("1-a", WHOLE).mapped
    assert again.requests.gets == s3.count("GET") == 0


def test_a_cached_file_may_vanish_while_it_is_read(new_store, tmp_path):
    put(new_store())
    held = new_store().read("1-a", WHOLE)
    shutil.rmtree(tmp_path / "cache")
    assert held.data.to_pybytes() == DATA
    store = new_store()
    assert store.read("1-a", WHOLE).data.to_pybytes() == DATA
    assert store.requests.gets == 1
    assert len(cached_files(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["shorter", "longer", "other", "empty"])
def test_a_damaged_file_of_the_cache_is_downloaded_again(new_store, tmp_path, damage):
    put(new_store())
    (path,) = cached_files(tmp_path)
    others = {"shorter": DATA[:-1], "longer": DATA + b"x", "other": DATA[:-1] + b"\0", "empty": b""}
    path.unlink()
    path.write_bytes(others[damage])
    store = new_store()
    assert store.read("1-a", WHOLE).data.to_pybytes() == DATA
    assert store.requests.gets == 1
    assert path.read_bytes() == DATA


def test_an_object_that_was_changed_is_corruption(new_store, tmp_path):
    put(new_store(), data=DATA[:-1] + bytes([DATA[-1] ^ 1]))
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(CorruptionError, match="is not what was written"):
        new_store().read("1-a", WHOLE)


def test_a_full_disk_is_harmless(new_store, tmp_path, monkeypatch):
    from pathlib import Path

    def full(_self, _data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    store = new_store()
    store.put("1-a", lambda file: file.write(DATA))
    assert not store.read("1-a", WHOLE).mapped  # from memory, while it is uploaded
    store.sync()
    found = new_store().read("1-a", WHOLE)
    assert (found.data.to_pybytes(), found.mapped) == (DATA, False)
    assert cached_files(tmp_path) == []


def test_a_folder_of_somebody_else_is_not_used(new_store, tmp_path):
    folder = tmp_path / "open to all"
    folder.mkdir()
    folder.chmod(0o777)
    store = new_store(folder=folder)
    put(store)
    assert store.read("1-a", WHOLE).data.to_pybytes() == DATA
    assert list(folder.iterdir()) == []


def test_the_cache_stays_within_its_size_and_drops_what_was_not_used_for_longest(
    new_store, tmp_path
):
    store = new_store(size_max=1_000_000)
    for number in range(8):
        put(store, f"1-{number}")
        store.cache.touch("1-0")
        os.utime(store.cache.path(f"1-{number}"), (number + 1, number + 1))
        os.utime(store.cache.path("1-0"))  # used all the time
    assert sum(path.stat().st_size for path in cached_files(tmp_path)) <= 1_000_000 * 17 // 16
    names = {path.name for path in cached_files(tmp_path)}
    assert "x-1-0" in names
    assert "x-1-1" not in names


def test_uploads_hold_a_bounded_number_of_bytes(s3, new_store, monkeypatch):
    from millstream.object_store import cached

    monkeypatch.setattr(cached, "UPLOAD_BYTES_MAX", 2 * len(DATA))
    s3.decide = lambda *_: Fault("slow", 0.05)
    store = new_store()
    for number in range(6):
        store.put(f"1-{number}", lambda file: file.write(DATA))
        assert store._uploading() <= 2 * len(DATA)
    store.sync()
    assert len(list(store.names())) == 6


def test_two_urls_do_not_share_files_of_a_cache(tmp_path, s3):
    first, second = (
        CachedObjectStore.open(f"s3://bucket/two-{number}", tmp_path / "cache", 1 << 30)
        for number in (1, 2)
    )
    put(first)
    put(second, data=DATA[::-1])
    assert len(cached_files(tmp_path)) == 2
