"""The faults of an object store in the protocols whose statuses and codes differ from S3's: Azure's on Azurite, and Google's."""

import itertools
import os
import shutil
from dataclasses import dataclass
from typing import Any

import azure_server
import google_server
import pyarrow as pa
import pytest
from s3_server import Fault

from millstream.errors import EnvironmentProblem, ObjectStoreUnavailableError
from millstream.object_store import client as client_module
from millstream.object_store.cached import checksum_of
from millstream.object_store.client import ObjectClient
from millstream.object_store.retries import RetryLimits
from millstream.object_store.store import Extent

DATA = os.urandom(300_000)
WHOLE = Extent(0, len(DATA), whole=True, checksum=checksum_of(pa.py_buffer(DATA)))


@dataclass
class Protocol:
    """A proxy of a server of the protocol, and how its stores are made, and what its environment is called."""

    proxy: Any
    new_store: Any
    scheme: str
    container: str
    variables: str
    refusal: str
    secrets: tuple[str, ...]

    def take_another_key(self, monkeypatch):
        if self.scheme == "az":
            monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "b3RoZXI=")
        else:
            other = google_server.AccountKey.make()
            monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", other.to_json())


@pytest.fixture(params=["google", pytest.param("azure", marks=pytest.mark.long)])
def protocol(request):
    proxy = request.getfixturevalue(request.param)
    make = request.getfixturevalue(f"new_{request.param}_store")
    if request.param == "google":
        secrets = (google_server.ACCOUNT, "PRIVATE KEY", "eyJ")
        return Protocol(
            proxy, make, "gs", "bucket", "GOOGLE_SERVICE", "status 401 Unauthorized", secrets
        )
    secrets = (azure_server.ACCOUNT, "b3RoZXI=", azure_server.KEY)
    return Protocol(
        proxy, make, "az", "container", "AZURE_STORAGE", "status 403 Forbidden", secrets
    )


def put(store, name="1-a"):
    store.put(name, lambda file: file.write(DATA))
    store.sync()


@pytest.mark.parametrize("kind", ["503", "cut upload", "lost answer", "slow", "silence"])
def test_an_upload_survives_two_faults(protocol, kind):
    protocol.proxy.fail_first(2, "PUT", kind)
    store = protocol.new_store()
    put(store)
    assert store.requests.retries == (0 if kind == "slow" else 2)
    assert protocol.new_store().client.get("1-a").to_pybytes() == DATA


@pytest.mark.parametrize("kind", ["503", "cut download", "lost answer", "slow", "silence"])
def test_a_download_survives_two_faults(protocol, tmp_path, kind):
    put(protocol.new_store())
    shutil.rmtree(tmp_path / "cache")
    protocol.proxy.fail_first(2, "GET", kind)
    store = protocol.new_store()
    assert store.read("1-a", WHOLE).data.to_pybytes() == DATA
    assert store.requests.gets == (1 if kind == "slow" else 3)


def test_a_torn_upload_leaves_no_object(protocol):
    protocol.proxy.fail_first(10**9, "PUT", "cut upload")
    with pytest.raises(ObjectStoreUnavailableError):
        put(protocol.new_store(policy=RetryLimits(1, 0.01, 0.05)))
    protocol.proxy.decide = lambda *_: None
    assert list(protocol.new_store().names()) == []


def test_a_lost_answer_is_not_taken_for_another_writers_object(protocol):
    put(protocol.new_store())
    protocol.proxy.fail_first(1, "PUT", "lost answer")
    put(protocol.new_store())  # the same bytes: as if the first answer had been lost
    protocol.proxy.fail_first(1, "PUT", "lost answer")
    other = protocol.new_store()
    with pytest.raises(FileExistsError):
        other.client.put("1-a", memoryview(DATA[::-1]))
    assert other.client.get("1-a").to_pybytes() == DATA


def test_many_names_are_listed_once_each_whatever_fails(protocol):
    store = protocol.new_store()
    names = [f"1-{number:02d}" for number in range(12)]
    for name in names:
        put(store, name)
    protocol.proxy.fail_first(1, "GET", "cut download")
    assert list(protocol.new_store().names()) == names
    for method in ("POST", "DELETE"):  # in one request, or in one for each
        protocol.proxy.fail_first(1, method, "503")
        store.delete_all()
        assert list(protocol.new_store().names()) == []
        put(store, "1-a")


def test_of_many_objects_most_of_whose_deletes_fail_all_are_deleted(protocol):
    client = protocol.new_store().client
    names = [f"1-{number:02d}" for number in range(12)]
    for name in names:
        client.put(name, memoryview(b"x"))
    numbers = itertools.count()
    protocol.proxy.decide = lambda method, _: (
        Fault("503") if method == "DELETE" and next(numbers) % 3 else None
    )
    client.delete(names)
    protocol.proxy.decide = lambda *_: None
    assert list(protocol.new_store().names()) == []


def test_a_container_that_is_not_there_is_told(protocol):
    client = ObjectClient(f"{protocol.scheme}://none/p")
    for call in (
        lambda: client.put("a", memoryview(b"x")),
        lambda: client.get("a"),
        lambda: list(client.names()),
    ):
        wanted = f"There is no {protocol.container} for {protocol.scheme}://none/p"
        with pytest.raises(EnvironmentProblem, match=wanted):
            call()


def test_a_wrong_key_is_refused_at_once_and_not_shown(protocol, monkeypatch):
    protocol.take_another_key(monkeypatch)
    client_module.open_requests.cache_clear()
    with pytest.raises(
        EnvironmentProblem, match=rf"{protocol.refusal} .*{protocol.variables}"
    ) as e:
        put(protocol.new_store())
    assert not any(secret in str(e.value) for secret in protocol.secrets)
    assert protocol.proxy.count("PUT") == 1
    client_module.open_requests.cache_clear()
